"""Deletion of jobs that have ended, on request and by age."""

from __future__ import annotations

from collections.abc import Collection

from vcasgd.errors import Conflict
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import no_such_job

#: Seconds in which a worker or a machine of a deleted job may still write: a line of its log, or
#: the end of a bill.
LATE_SECONDS = 600
#: Jobs that one call deletes at most; leases must not wait long.
JOBS_AT_ONCE = 50


class Retention:
    """Deletes jobs from the ledger: record, history, costs. Their checkpoints stay.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._delete = ledger.script("ledger/delete")

    def delete(self, job: str) -> None:
        """Delete a job.

        Raises :class:`~vcasgd.errors.NotFound`, and :class:`Conflict` if it has not ended."""
        answer = self._delete(
            keys=[names.JOBS, names.ACTIVE, names.DELETED, *LedgerKeys(job).all], args=[job]
        )
        if answer == b"unknown":
            raise no_such_job(job)
        if answer == b"active":
            raise Conflict(f"job {job} has not ended", remedy=f"run vcasgd cancel {job} first")

    def keep(self, most: int, spared: Collection[str] = ()) -> list[str]:
        """Delete the oldest jobs that have ended, so that ``most`` of them and ``spared`` are left.

        Returns those that this call deleted; call it again while there are any.
        """
        with self._ledger.pipeline() as pipe:
            pipe.zcard(names.JOBS)
            pipe.smembers(names.ACTIVE)
            total, active = pipe.execute()
        others = {job.decode() for job in active} | set(spared)
        excess = min(total - len(others) - most, JOBS_AT_ONCE)
        if excess <= 0:
            return []
        oldest = self._ledger.zrange(names.JOBS, 0, excess + len(others) - 1)
        deleted = [job.decode() for job in oldest if job.decode() not in others][:excess]
        for job in deleted:
            self.delete(job)
        return deleted

    def delete_late_writes(self) -> None:
        """Delete what was written for jobs after their deletion, once nothing more can follow."""
        before = self._ledger.now() - LATE_SECONDS
        jobs = self._ledger.zrangebyscore(names.DELETED, "-inf", before)
        for job in jobs:
            with self._ledger.pipeline() as pipe:
                pipe.unlink(*LedgerKeys(job.decode()).all)
                pipe.zrem(names.DELETED, job)
                pipe.execute()
