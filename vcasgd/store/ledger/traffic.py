"""Bytes that the workers of a job pushed and fetched.

Each worker reports its own sums in its heartbeats. When it is removed, they are added to those of
the job's earlier workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.heartbeats import Heartbeat


@dataclass(frozen=True)
class Traffic:
    """Bytes of updates and snapshots, as they are encoded on the network."""

    pushed_bytes: int = 0
    fetched_bytes: int = 0

    @classmethod
    def of(cls, heartbeat: Heartbeat) -> Traffic:
        """Return the sums of one worker; one that it doesn't report counts as 0."""
        return cls(heartbeat.pushed_bytes or 0, heartbeat.fetched_bytes or 0)

    @classmethod
    def of_job(cls, removed: Mapping[bytes, bytes], heartbeats: Iterable[Heartbeat]) -> Traffic:
        """Return the sums of all workers. ``removed``: the ledger's hash."""
        present = [cls.of(heartbeat) for heartbeat in heartbeats]

        def total(name: str) -> int:
            earlier = int(Decimal(removed.get(name.encode(), b"0").decode()))
            return earlier + sum(int(getattr(each, name)) for each in present)

        return cls(total("pushed_bytes"), total("fetched_bytes"))


def keep_traffic(pipe: Any, job: str, heartbeats: Iterable[Heartbeat]) -> None:
    """Add the sums of workers that are being removed to those of their job's earlier workers."""
    for name, count in asdict(Traffic.of_job({}, heartbeats)).items():
        if count:
            # A float, because the server refuses to increment an integer beyond 64 bits.
            pipe.hincrbyfloat(LedgerKeys(job).traffic, name, count)
