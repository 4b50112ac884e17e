"""The names of parts: of some kinds each store node has one of its own."""

from __future__ import annotations

#: on each store node a tensors server and a parameter server
PER_NODE = ("tensors", "server")


def part_names(kind: str, nodes: int) -> list[str]:
    """In the order of the store nodes; where there is but one, nothing is numbered."""
    if kind not in PER_NODE or nodes == 1:
        return [kind]
    return [f"{kind}-{node}" for node in range(nodes)]


def kind_of(name: str) -> str:
    """``tensors`` of ``tensors-2``."""
    return name.partition("-")[0]


def node_of(name: str) -> int:
    """2 of ``tensors-2``."""
    return int(name.partition("-")[2] or 0)
