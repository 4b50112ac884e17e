"""Heartbeats of all workers, and the bytes that a job's workers pushed and fetched.

A job can have 10,000 workers, and several parts of a process ask for their heartbeats several times
a second, so a text that has not changed is not parsed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.heartbeats import Heartbeat, worker_name

#: Jobs whose heartbeats stay in memory.
JOBS_CACHED = 256


@dataclass(frozen=True)
class Traffic:
    """Bytes of updates and snapshots, as they are encoded on the network.

    Each worker reports its own sums in its heartbeats. When it is removed, they are added to those
    of the job's earlier workers.
    """

    pushed_bytes: int = 0
    fetched_bytes: int = 0

    @classmethod
    def of_job(cls, removed: Mapping[bytes, bytes], heartbeats: Iterable[Heartbeat]) -> Traffic:
        """Return the sums of all workers. ``removed``: the ledger's hash."""
        pushed, fetched = (
            int(Decimal(removed.get(name, b"0").decode()))
            for name in (b"pushed_bytes", b"fetched_bytes")
        )
        for beat in heartbeats:
            pushed += beat.pushed_bytes or 0
            fetched += beat.fetched_bytes or 0
        return cls(pushed, fetched)


def keep_traffic(pipe: Any, job: str, heartbeats: Iterable[Heartbeat]) -> None:
    """Add the sums of workers that are being removed to those of their job's earlier workers."""
    for name, count in asdict(Traffic.of_job({}, heartbeats)).items():
        if count:
            # A float, because the server refuses to increment an integer beyond 64 bits.
            pipe.hincrbyfloat(LedgerKeys(job).traffic, name, count)


class WorkerBeats:
    """Last heartbeat of each worker. Threads may share it.

    Methods raise :class:`~vcasgd.errors.StoreUnavailable`. Workers may have written anything, so
    names and heartbeats that can't be read are left out.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        #: The last texts of each job's workers, with what they say.
        self._parsed: dict[str, dict[bytes, tuple[bytes, Heartbeat | None]]] = {}

    def of(self, job: str) -> dict[str, Heartbeat]:
        """Return the heartbeats of a job by worker."""
        return self.of_many([job])[job]

    def of_many(self, jobs: Collection[str]) -> dict[str, dict[str, Heartbeat]]:
        """Return the heartbeats of several jobs, in one round trip."""
        return {job: beats for job, (beats, _) in self._read(jobs).items()}

    def traffic(self, job: str) -> Traffic:
        """Return the bytes that all workers of a job have moved, also those that were removed."""
        return self.traffic_of([job])[job]

    def traffic_of(self, jobs: Collection[str]) -> dict[str, Traffic]:
        """Return the traffic of several jobs, in one round trip."""
        return {
            job: Traffic.of_job(removed, beats.values())
            for job, (beats, removed) in self._read(jobs).items()
        }

    def _read(
        self, jobs: Collection[str]
    ) -> dict[str, tuple[dict[str, Heartbeat], dict[bytes, bytes]]]:
        # A transaction: the sums of removed workers fit the heartbeats of the others.
        with self._ledger.pipeline(transaction=True) as pipe:
            for job in jobs:
                pipe.hgetall(LedgerKeys(job).workers)
                pipe.hgetall(LedgerKeys(job).traffic)
            rows = pipe.execute()
        return {
            job: (self._beats(job, texts), removed)
            for job, texts, removed in zip(jobs, rows[::2], rows[1::2], strict=True)
        }

    def _beats(self, job: str, texts: Mapping[bytes, bytes]) -> dict[str, Heartbeat]:
        before, parsed = self._parsed.get(job, {}), {}
        for name, text in texts.items():
            known = before.get(name)
            parsed[name] = known if known and known[0] == text else (text, Heartbeat.parse(text))
        if len(self._parsed) > JOBS_CACHED:
            self._parsed.clear()
        self._parsed[job] = parsed
        named = ((worker_name(name), beat) for name, (_, beat) in parsed.items())
        return {name: beat for name, beat in named if name is not None and beat is not None}


def read_beats(
    ledger: RedisClient, workers: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Heartbeat]:
    """Return the last heartbeats of some workers, given by job and name, in one round trip.

    Workers without one that can be read are missing.
    """
    pairs = list(workers)
    with ledger.pipeline() as pipe:
        for job, worker in pairs:
            pipe.hget(LedgerKeys(job).workers, worker)
        texts = pipe.execute()
    beats = {pair: Heartbeat.parse(text or b"") for pair, text in zip(pairs, texts, strict=True)}
    return {pair: beat for pair, beat in beats.items() if beat is not None}
