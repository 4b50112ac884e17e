"""Placement of a job's workers: their pools, cleared for its data or not, and their owners.

A job has labels (:attr:`~vcasgd.spec.job.JobSpec.required_labels`); a pool has the labels that it
is cleared for. Before the controller starts a worker, it records the worker's pool with the digest
of a pass that only the controller and that worker can derive. ``scripts/ledger/clearance.lua``
checks both in the same step that grants or renews a lease. So a pool that loses a label stops its
workers at once, and a worker that claims another name or pool gets no work.

Without users for workers (``VCASGD_JOB_USERS=false``) there are no passes: every worker has the
credentials of the platform and is trusted with much more.

A volunteer's machine has an owner: the token that it joined with. The controller records it before
it starts a worker, so no worker chooses its owner. Machines of one's own have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import CLEARANCES, LedgerKeys
from vcasgd.store.ledger.untrusted import MAX_REASON_LENGTH, worker_name


class Suspect(BaseModel):
    """Why an owner gets no more work in a job.

    ``version`` of the ``shard`` has no update of it that may be wrong; None if none was applied.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    why: str
    shard: int = 0
    version: int | None = None


#: Start of the fields of suspects among the tuned values.
_FIELD = "suspect:"


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

    def place(self, workers: Mapping[str, Mapping[str, tuple[str, str]]]) -> None:
        """Record pool and pass of new workers, by job and worker, before they start."""
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


class Owners:
    """Owners in all jobs. Calls raise :class:`~vcasgd.errors.StoreUnavailable`, and can be
    repeated."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def place(self, workers: Mapping[str, Mapping[str, str]]) -> None:
        """Record the owners of new workers, by job and worker.

        Workers of an owner that is a suspect in the job are put in quarantine before they start.
        """
        for job, owners in workers.items():
            if owners:
                self._ledger.hset(LedgerKeys(job).owners, mapping=dict(owners))
                suspects = self.suspects(job)
                self._exclude(job, {w: suspects[o].why for w, o in owners.items() if o in suspects})

    def owner(self, job: str, worker: str) -> str | None:
        """Return the owner of a worker's machine; None for a machine of one's own."""
        owner = self._ledger.hget(LedgerKeys(job).owners, worker)
        return None if owner is None else owner.decode()

    def accuse(self, job: str, owner: str, suspect: Suspect) -> bool:
        """Put all workers of an owner in quarantine. Return False if it already was a suspect."""
        keys = LedgerKeys(job)
        # There, parameter servers and controller read it anyway.
        new = self._ledger.hsetnx(keys.tuning, f"{_FIELD}{owner}", suspect.model_dump_json())
        owned = self._ledger.hgetall(keys.owners)
        workers = [worker.decode() for worker, each in owned.items() if each.decode() == owner]
        self._exclude(job, dict.fromkeys(workers, f"owner {owner}: {suspect.why}"))
        return bool(new)

    def suspects(self, job: str) -> dict[str, Suspect]:
        """Return the owners that were accused in a job."""
        return read_suspects(self._ledger.hgetall(LedgerKeys(job).tuning))

    def _exclude(self, job: str, reasons: Mapping[str, str]) -> None:
        if reasons:
            self._ledger.hset(LedgerKeys(job).quarantine, mapping=dict(reasons))


def read_suspects(rows: Mapping[bytes, bytes]) -> dict[str, Suspect]:
    """Return the suspects in the hash of tuned values; raises :class:`ValueError`."""
    return {
        name.decode().removeprefix(_FIELD): Suspect.model_validate_json(row)
        for name, row in rows.items()
        if name.startswith(_FIELD.encode())
    }
