"""Names and labels of a pool's pods. The name of a pod is that of the machine.

They say whose a pod is, so that no other record is needed to find the machines again.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

CLUSTER_LABEL = "vcasgd.dev/cluster"
POOL_LABEL = "vcasgd.dev/pool"
LAUNCH_LABEL = "vcasgd.dev/launch"
#: Zone that a launch was restricted to; the zone of a node is not visible to the control plane.
ZONE_LABEL = "vcasgd.dev/zone"

_MACHINE = re.compile(
    r"join-(?P<pool>[a-z][a-z0-9-]{0,39})-(?P<launch>[0-9a-f]{12})-(?P<index>[0-9]{1,4})"
)


def launch_name(cluster: str, pool: str, token: str) -> str:
    """Return the name of a launch, which is part of the names of its pods.

    A second creation of a pod with the same name is refused, so a launch can be repeated.
    """
    return hashlib.sha256(f"{cluster}/{pool}/{token}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class PodName:
    """Name of a machine: its pool, the launch, and its number in the launch."""

    pool: str
    launch: str
    index: int

    def __str__(self) -> str:
        return f"join-{self.pool}-{self.launch}-{self.index}"

    @classmethod
    def parse(cls, name: str) -> PodName | None:
        """Parse the name of a machine; None if it isn't one of a Kubernetes pool."""
        match = _MACHINE.fullmatch(name)
        return cls(match["pool"], match["launch"], int(match["index"])) if match else None
