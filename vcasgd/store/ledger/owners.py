"""Owners of volunteers' machines, and those whose work in a job was found wrong.

An owner is the token that a machine joined with. The controller records it before it starts a
worker, so no worker chooses its owner. Machines of one's own have none.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys


class Suspect(BaseModel):
    """Why an owner gets no more work in a job.

    ``version`` of the ``shard`` has no update of it that may be wrong; None if none was applied.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    why: str
    shard: int = 0
    version: int | None = None


#: Start of the fields of suspects.
_FIELD = "suspect:"


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
