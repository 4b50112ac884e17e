"""The names of parts: of some kinds each store node has one of its own."""

from __future__ import annotations

#: on each store node a tensors server and a parameter server
PER_NODE = ("tensors", "server")
#: kinds that can have a replica
REPLICATED = ("ledger", "tensors")
_REPLICA = "-replica"


def part_names(kind: str, nodes: int) -> list[str]:
    """In the order of the store nodes; where there is but one, nothing is numbered."""
    if kind not in PER_NODE or nodes == 1:
        return [kind]
    return [f"{kind}-{node}" for node in range(nodes)]


def replica_of(name: str) -> str:
    """The second server of ``ledger``, or of ``tensors-2``; either may be the primary."""
    return f"{name}{_REPLICA}"


def service_of(name: str) -> str:
    """``tensors-2`` of ``tensors-2`` and of ``tensors-2-replica``."""
    return name.removesuffix(_REPLICA)


def kind_of(name: str) -> str:
    """``tensors`` of ``tensors-2``."""
    return name.partition("-")[0]


def node_of(name: str) -> int:
    """2 of ``tensors-2``."""
    return int(service_of(name).partition("-")[2] or 0)
