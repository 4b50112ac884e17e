"""Workers of jobs in the ledger: heartbeats, drains, quarantine, and lost machines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from operator import attrgetter
from typing import Any

from vcasgd.schemas.jobs import TrafficView
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.untrusted import Heartbeat, worker_name

#: Jobs whose heartbeats stay in memory.
JOBS_CACHED = 256


def _traffic(removed: Mapping[bytes, bytes], heartbeats: Iterable[Heartbeat]) -> TrafficView:
    """Return the sums of a job. Each worker reports its own sums in its heartbeats.

    ``removed``: the ledger's hash, to which those of a worker are added when it is removed.
    """
    pushed, fetched = (
        int(Decimal(removed.get(name, b"0").decode()))
        for name in (b"pushed_bytes", b"fetched_bytes")
    )
    for beat in heartbeats:
        pushed += beat.pushed_bytes or 0
        fetched += beat.fetched_bytes or 0
    return TrafficView(pushed_bytes=pushed, fetched_bytes=fetched)


class JobWorkers:
    """Workers of all jobs. Calls raise :class:`~vcasgd.errors.StoreUnavailable`."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def heartbeats(self, job: str) -> dict[str, Heartbeat]:
        """Return the last heartbeat of each worker of a job, without those that can't be read."""
        return WorkerBeats(self._ledger).of(job)

    def heartbeat(self, job: str, worker: str) -> Heartbeat | None:
        """Return the last heartbeat of a worker; None without one that can be read."""
        return Heartbeat.parse(self._ledger.hget(LedgerKeys(job).workers, worker) or b"")

    def names(self, job: str) -> set[str]:
        """Return the names of the workers that have a heartbeat and were not removed."""
        return self.names_of([job])[job]

    def names_of(self, jobs: Collection[str]) -> dict[str, set[str]]:
        """Return :meth:`names` of several jobs, in one round trip."""
        rows = self._of_each(jobs, "HKEYS", attrgetter("workers"))
        return {
            job: {name for name in map(worker_name, row) if name is not None}
            for job, row in rows.items()
        }

    def count(self, job: str) -> int:
        """Return the number of workers that have a heartbeat and were not removed."""
        return self.counts([job])[job]

    def counts(self, jobs: Collection[str]) -> dict[str, int]:
        """Return :meth:`count` of several jobs, in one round trip."""
        return self._of_each(jobs, "HLEN", attrgetter("workers"))

    def remove(self, job: str, worker: str) -> None:
        """Remove a worker that is gone for good. Its traffic stays in the job's sum."""
        self.remove_all({job: [worker]})

    def remove_all(self, workers: Mapping[str, Collection[str]]) -> None:
        """Remove several workers of several jobs, in two round trips."""
        due = {job: list(names) for job, names in workers.items() if names}
        with self._ledger.pipeline() as pipe:
            for job, names in due.items():
                pipe.hmget(LedgerKeys(job).workers, names)
            texts = pipe.execute()
        with self._ledger.pipeline(transaction=True) as pipe:
            for (job, names), row in zip(due.items(), texts, strict=True):
                keys = LedgerKeys(job)
                pipe.hdel(keys.workers, *names)
                pipe.srem(keys.draining, *names)
                beats = filter(None, (Heartbeat.parse(text) for text in row if text))
                for name, count in dict(_traffic({}, beats)).items():
                    if count:
                        # A float: the server refuses to increment an integer beyond 64 bits.
                        pipe.hincrbyfloat(keys.traffic, name, count)
            pipe.execute()

    def drain(self, workers: Iterable[tuple[str, str]]) -> None:
        """Request that workers, given by job and name, push their work, return the rest of their
        leases, and leave."""
        with self._ledger.pipeline() as pipe:
            for job, worker in workers:
                pipe.sadd(LedgerKeys(job).draining, worker)
            pipe.execute()

    def draining(self, job: str) -> set[str]:
        """Return the workers that were asked to leave."""
        return self.draining_of([job])[job]

    def draining_of(self, jobs: Collection[str]) -> dict[str, set[str]]:
        """Return the workers of several jobs that were asked to leave, in one round trip."""
        rows = self._of_each(jobs, "SMEMBERS", attrgetter("draining"))
        return {job: {name.decode() for name in row} for job, row in rows.items()}

    def quarantine(self, job: str, worker: str, why: str) -> bool:
        """Give an untrusted worker no more work. Returns False if it was already quarantined."""
        return bool(self._ledger.hset(LedgerKeys(job).quarantine, worker, why))

    def quarantined(self, job: str) -> dict[str, str]:
        """Return the quarantined workers of a job with the reasons."""
        return self.quarantined_of([job])[job]

    def quarantined_of(self, jobs: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the quarantined workers of several jobs, in one round trip."""
        rows = self._of_each(jobs, "HGETALL", attrgetter("quarantine"))
        return {
            job: {worker.decode(): why.decode() for worker, why in row.items()}
            for job, row in rows.items()
        }

    def _of_each(
        self, jobs: Collection[str], command: str, key: Callable[[LedgerKeys], str]
    ) -> dict[str, Any]:
        """Return the answers to a command with a key of each job, in one round trip."""
        answers = self._ledger.of_each(command, (key(LedgerKeys(job)) for job in jobs))
        return dict(zip(jobs, answers, strict=True))

    def record_losses(self, losses: Iterable[tuple[str, str, str]]) -> list[bool]:
        """Record losses of machines, given by job, machine, and how it was lost.

        That is ``evicted`` (with a notice) or ``killed``. Returns for each whether it is new.
        """
        with self._ledger.pipeline() as pipe:
            for job, machine, how in losses:
                pipe.hsetnx(LedgerKeys(job).vanished, machine, how)
            return [bool(new) for new in pipe.execute()]


class WorkerBeats:
    """Last heartbeat of each worker. Threads may share it.

    A job can have 10,000 workers, and several parts of a process ask for their heartbeats several
    times a second, so a text that has not changed is not parsed again. Names and heartbeats that
    can't be read are left out. Methods raise :class:`~vcasgd.errors.StoreUnavailable`.
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

    def traffic(self, job: str) -> TrafficView:
        """Return the bytes that all workers of a job have moved, also those that were removed."""
        return self.traffic_of([job])[job]

    def traffic_of(self, jobs: Collection[str]) -> dict[str, TrafficView]:
        """Return the traffic of several jobs, in one round trip."""
        return {
            job: _traffic(removed, beats.values())
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
