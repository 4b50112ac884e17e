"""Names of a pool's jobs in Slurm, and of its machines in the cluster.

The name of a job says whose it is, so that no other record is needed to find the machines again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = re.compile(
    r"vcasgd/(?P<cluster>[a-z0-9-]{1,40})/(?P<pool>[a-z][a-z0-9-]{0,39})/(?P<token>[\w.:-]{1,64})"
)
_MACHINE = re.compile(
    r"join-(?P<pool>[a-z][a-z0-9-]{0,39})-(?P<array>[1-9][0-9]{0,9})-(?P<index>[0-9]{1,7})"
)


@dataclass(frozen=True)
class Label:
    """Owner of a job: the cluster, the pool, and the token of the launch."""

    cluster: str
    pool: str
    token: str

    def __str__(self) -> str:
        return f"vcasgd/{self.cluster}/{self.pool}/{self.token}"

    @classmethod
    def parse(cls, name: str) -> Label | None:
        """Parse the name of a job; None if it isn't one of vcasgd's."""
        match = _LABEL.fullmatch(name)
        return cls(**match.groupdict()) if match else None


def machine_name(pool: str, array: str, index: str) -> str:
    """Return the name of a machine from the array's id and the job's index in it, as text."""
    return f"join-{pool}-{array}-{index}"


@dataclass(frozen=True)
class MachineName:
    """Name of a machine: the pool, and the job as one element of an array."""

    pool: str
    array: int
    index: int

    def __str__(self) -> str:
        return machine_name(self.pool, str(self.array), str(self.index))

    @property
    def job(self) -> str:
        """The job's id in Slurm."""
        return f"{self.array}_{self.index}"

    @classmethod
    def parse(cls, name: str) -> MachineName | None:
        """Parse the name of a machine; None if it isn't one of a Slurm pool."""
        match = _MACHINE.fullmatch(name)
        return cls(match["pool"], int(match["array"]), int(match["index"])) if match else None
