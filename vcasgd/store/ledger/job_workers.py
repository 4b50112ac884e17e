"""Workers of jobs in the ledger: heartbeats, drains, quarantine, and lost machines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.heartbeats import Heartbeat, worker_name
from vcasgd.store.ledger.worker_beats import WorkerBeats, keep_traffic


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
        rows = self._of_each(jobs, lambda pipe, keys: pipe.hkeys(keys.workers))
        return {
            job: {name for name in map(worker_name, row) if name is not None}
            for job, row in rows.items()
        }

    def count(self, job: str) -> int:
        """Return the number of workers that have a heartbeat and were not removed."""
        return self.counts([job])[job]

    def counts(self, jobs: Collection[str]) -> dict[str, int]:
        """Return :meth:`count` of several jobs, in one round trip."""
        return self._of_each(jobs, lambda pipe, keys: pipe.hlen(keys.workers))

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
                beats = [Heartbeat.parse(text) for text in row if text]
                keep_traffic(pipe, job, [beat for beat in beats if beat])
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
        rows = self._of_each(jobs, lambda pipe, keys: pipe.smembers(keys.draining))
        return {job: {name.decode() for name in row} for job, row in rows.items()}

    def quarantine(self, job: str, worker: str, why: str) -> bool:
        """Give an untrusted worker no more work. Returns False if it was already quarantined."""
        return bool(self._ledger.hset(LedgerKeys(job).quarantine, worker, why))

    def quarantined(self, job: str) -> dict[str, str]:
        """Return the quarantined workers of a job with the reasons."""
        return self.quarantined_of([job])[job]

    def quarantined_of(self, jobs: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the quarantined workers of several jobs, in one round trip."""
        rows = self._of_each(jobs, lambda pipe, keys: pipe.hgetall(keys.quarantine))
        return {
            job: {worker.decode(): why.decode() for worker, why in row.items()}
            for job, row in rows.items()
        }

    def _of_each(
        self, jobs: Collection[str], read: Callable[[Any, LedgerKeys], object]
    ) -> dict[str, Any]:
        """Return what a command reads of each job, in one round trip."""
        with self._ledger.pipeline() as pipe:
            for job in jobs:
                read(pipe, LedgerKeys(job))
            return dict(zip(jobs, pipe.execute(), strict=True))

    def record_losses(self, losses: Iterable[tuple[str, str, str]]) -> list[bool]:
        """Record losses of machines, given by job, machine, and how it was lost.

        That is ``evicted`` (with a notice) or ``killed``. Returns for each whether it is new.
        """
        with self._ledger.pipeline() as pipe:
            for job, machine, how in losses:
                pipe.hsetnx(LedgerKeys(job).vanished, machine, how)
            return [bool(new) for new in pipe.execute()]
