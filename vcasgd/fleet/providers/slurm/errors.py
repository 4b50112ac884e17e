"""Mapping of the messages of Slurm's commands to errors of the fleet.

The texts are those of ``slurm_strerror`` (``src/common/slurm_errno.c``), which the commands print.
"""

from __future__ import annotations

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)

#: Parts of messages, in lowercase, in the order in which they are looked for.
_TEXTS: dict[type[FleetError], tuple[str, ...]] = {
    QuotaExceeded: (
        "violates accounting/qos policy",
        "qosmax",
        "qosgrp",
        "assocmax",
        "assocgrp",
        "accounting policy",
        "exceeds limits",
        "maxsubmit",
    ),
    Throttled: (
        "slurm temporarily unable to accept job",
        "unable to accept job",
        "too many",
        "rate limit",
    ),
    NoCapacity: (
        "requested node configuration is not available",
        "nodes required for job are down",
        "required node not available",
        "required partition not available",
        "partition is down",
        "no partition specified or system default partition",
        "nodes are busy",
    ),
    CloudDenied: (
        "access/permission denied",
        "permission denied",
        "invalid account or account/partition",
        "invalid user id",
        "user not found on host",
        "protocol authentication error",
        "authentication",
        "munge",
        "user's group not permitted",
    ),
    InvalidRequest: (
        "invalid partition",
        "invalid qos",
        "invalid feature",
        "invalid generic resource",
        "invalid job array",
        "invalid time",
        "time limit",
        "invalid",
        "unrecognized option",
        "memory specification",
        "more processors requested",
        "cpu count",
        "node count",
    ),
    CloudUnavailable: (
        "unable to contact slurm controller",
        "connection refused",
        "timed out",
        "socket timed out",
        "connect failure",
        "could not establish a configuration source",
        "zero bytes were transmitted",
        "error receiving",
    ),
}
_REMEDIES: dict[type[FleetError], str] = {
    QuotaExceeded: "ask the cluster's administrator for a higher limit, or set max_instances",
    NoCapacity: "see sinfo; other partitions (zones) or pools may have machines",
    CloudDenied: "check the pool's account and zones with scontrol show partition",
    InvalidRequest: "check the pool's zones and template against sinfo and sbatch",
    CloudUnavailable: "check with sinfo whether this machine reaches Slurm's controller",
}


def error_of(command: str, output: str, *, pool: str | None = None) -> FleetError:
    """Convert the output of a command that failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    text = "; ".join(line.removeprefix(f"{command}: ").removeprefix("error: ") for line in lines)
    kind = kind_of(text)
    where = f"{pool}: " if pool else ""
    return kind(
        f"{where}{command}: {text[:300] or 'it failed without a message'}",
        remedy=_REMEDIES.get(kind),
        **({"pool": pool} if pool else {}),
    )


def kind_of(text: str) -> type[FleetError]:
    """Return the error class for a message; :class:`CloudUnavailable` for an unknown one."""
    lower = text.lower()
    matching = (kind for kind, parts in _TEXTS.items() if any(part in lower for part in parts))
    return next(matching, CloudUnavailable)
