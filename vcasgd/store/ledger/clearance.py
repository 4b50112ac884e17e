"""Clearances of pools for labelled data, and the pool of each worker.

A job has labels (:attr:`~vcasgd.spec.job.JobSpec.required_labels`); a pool has the labels that it
is cleared for. Before the controller starts a worker, it records the worker's pool with the digest
of a pass that only the controller and that worker can derive. ``scripts/ledger/clearance.lua``
checks both in the same step that grants or renews a lease. So a pool that loses a label stops its
workers at once, and a worker that claims another name or pool gets no work.

Without users for workers (``VCASGD_JOB_USERS=false``) there are no passes: every worker has the
credentials of the platform and is trusted with much more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import CLEARANCES, LedgerKeys
from vcasgd.store.ledger.heartbeats import worker_name
from vcasgd.store.ledger.untrusted import MAX_REASON_LENGTH


class Clearances:
    """Clearances of pools and placements of workers. Only the controller writes them.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def allow(self, pools: Mapping[str, Iterable[str]]) -> None:
        """Replace the labels of all pools; a pool that is missing is cleared for none."""
        rows = {pool: " ".join(sorted(labels)) for pool, labels in pools.items()}
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.delete(CLEARANCES)
            if rows:
                pipe.hset(CLEARANCES, mapping=rows)
            pipe.execute()

    def allowed(self) -> dict[str, frozenset[str]]:
        """Return the labels that each pool is cleared for."""
        rows = self._ledger.hgetall(CLEARANCES)
        return {pool.decode(): frozenset(each.decode().split()) for pool, each in rows.items()}

    def place(self, job: str, worker: str, pool: str, lease_pass: str = "") -> None:
        """Record the pool and the pass of a worker, before it starts."""
        self.place_all({job: {worker: (pool, lease_pass)}})

    def place_all(self, workers: Mapping[str, Mapping[str, tuple[str, str]]]) -> None:
        """Do the same as :meth:`place` for workers of several jobs, given with pool and pass."""
        with self._ledger.pipeline() as pipe:
            for job, placed in workers.items():
                rows = {
                    worker: f"{pool}|{hashlib.sha1(text.encode()).hexdigest() if text else ''}"
                    for worker, (pool, text) in placed.items()
                }
                if rows:
                    pipe.hset(LedgerKeys(job).placed, mapping=rows)
            pipe.execute()

    def placed(self, job: str) -> set[str]:
        """Return all workers that the controller has placed for a job."""
        return {name.decode() for name in self._ledger.hkeys(LedgerKeys(job).placed)}

    def refused(self, job: str) -> dict[str, str]:
        """Return workers of a job that got no work, each with the clearance that it last lacked.

        Workers may have written anything, so invalid entries are left out.
        """
        rows = self._ledger.hgetall(LedgerKeys(job).refused)
        return {
            name: why.decode(errors="replace")[:MAX_REASON_LENGTH]
            for worker, why in rows.items()
            if (name := worker_name(worker)) is not None
        }

    def uncleared(self, job: str, workers: Collection[str]) -> set[str]:
        """Return the workers that are not cleared for the job's data."""
        keys = LedgerKeys(job)
        labels = (self._ledger.hget(keys.record, "labels") or b"").decode().split()
        if not labels or not workers:
            return set()
        names = list(workers)
        entries = self._ledger.hmget(keys.placed, names)
        pools = [each.decode().partition("|")[0] if each else None for each in entries]
        allowed = self.allowed()
        return {
            name
            for name, pool in zip(names, pools, strict=True)
            if pool is None or not allowed.get(pool, frozenset()).issuperset(labels)
        }
