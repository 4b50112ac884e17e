"""Which pools may see which data, and who was placed where: what leases of labelled jobs ask for.

A job has labels (:attr:`~vcasgd.spec.job.JobSpec.required_labels`), a pool has those that it may
see.
Before the controller starts a worker it records its pool here, with the digest of a pass that only
the controller and that worker can derive. ``scripts/ledger/clearance.lua`` compares, in the same
step in
which a lease is given or renewed; so a pool that loses a label stops its workers at once, and a
worker that says it is another one, or elsewhere, gets nothing.

Where workers have no users of their own (``VCASGD_JOB_USERS=false``) there are no passes either:
each has the credentials of the platform, and is trusted with more than that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import CLEARANCES, LedgerKeys


class Clearances:
    """Written by the controller alone. Calls raise :class:`~vcasgd.errors.StoreUnavailable` and
    may be repeated."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def allow(self, pools: Mapping[str, Iterable[str]]) -> None:
        """By pool, the labels that it may see; pools that are not named may see none."""
        rows = {pool: " ".join(sorted(labels)) for pool, labels in pools.items()}
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.delete(CLEARANCES)
            if rows:
                pipe.hset(CLEARANCES, mapping=rows)
            pipe.execute()

    def allowed(self) -> dict[str, frozenset[str]]:
        found = self._ledger.hgetall(CLEARANCES)
        return {pool.decode(): frozenset(each.decode().split()) for pool, each in found.items()}

    def place(self, job: str, worker: str, pool: str, lease_pass: str = "") -> None:
        """Before the worker is started."""
        digest = hashlib.sha1(lease_pass.encode()).hexdigest() if lease_pass else ""
        self._ledger.hset(LedgerKeys(job).placed, worker, f"{pool}|{digest}")

    def pool_refused(self, job: str, pool: str, why: str) -> bool:
        """A pool falls out for a job. False where that was known."""
        key, field = LedgerKeys(job).refused, f"pool {pool}"
        known = self._ledger.hget(key, field)
        if known is not None and known.decode() == why:
            return False
        self._ledger.hset(key, field, why)
        return True

    def uncleared(self, job: str, workers: Collection[str]) -> set[str]:
        """Those of the workers that may not see the job's data."""
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
