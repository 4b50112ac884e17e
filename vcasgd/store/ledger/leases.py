"""Leases: who may train which subtask until when. All truth is in the ledger's clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import CLEARANCES, LedgerKeys

#: how the reason begins where a worker gets nothing for want of a clearance
UNCLEARED = "not cleared"


class WorkKind(StrEnum):
    """What a piece of work is."""

    INITIALISE = "initialise"
    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class Lease:
    """The right to do one piece of work; ``token`` grows with every lease of the job."""

    kind: WorkKind
    number: int
    token: int

    @property
    def piece(self) -> str:
        return f"{self.kind}:{self.number}"


@dataclass(frozen=True)
class Wait:
    """There is no work for this worker at the moment, and why."""

    reason: str

    @property
    def quarantined(self) -> bool:
        return self.reason == "quarantined"

    @property
    def uncleared(self) -> bool:
        """The worker's pool may not see the job's data."""
        return self.reason.startswith(UNCLEARED)


@dataclass(frozen=True)
class Renewal:
    """What a heartbeat brings back."""

    state: str
    leave: str
    lost: frozenset[str]

    @property
    def uncleared(self) -> bool:
        return self.leave.startswith(UNCLEARED)


class Leases:
    """The leases of one job, as one worker sees them.

    Every call may raise :class:`~vcasgd.errors.StoreUnavailable` and may be repeated: an
    acquired lease whose answer was lost expires by itself. ``lease_pass`` shows that the worker
    is who it says, see :class:`~vcasgd.store.ledger.clearance.Clearances`.
    """

    def __init__(
        self, ledger: RedisClient, job: str, worker: str, lease_seconds: float, lease_pass: str = ""
    ) -> None:
        self._ledger = ledger
        self._keys = LedgerKeys(job)
        self._pass = lease_pass
        self._worker = worker
        self._lease_ms = int(lease_seconds * 1000)
        self._acquire = ledger.script("ledger/acquire")
        self._renew = ledger.script("ledger/renew")
        self._release = ledger.script("ledger/release")
        self._report = ledger.script("ledger/report")

    def acquire(self, only: WorkKind | None = None) -> Lease | Wait:
        """The next piece of work, of one kind if asked to."""
        keys = self._keys
        answer = self._acquire(
            keys=[keys.record, keys.work, keys.leases, keys.holders, keys.open, keys.quarantine,
                  keys.done, keys.counters, keys.placed, CLEARANCES, keys.refused, keys.events],
            args=[self._worker, self._lease_ms, only or "", self._pass],
        )  # fmt: skip
        if answer[0] == b"wait":
            return Wait(answer[1].decode())
        return Lease(WorkKind(answer[0].decode()), int(answer[1]), int(answer[2]))

    def renew(self, heartbeat: Mapping[str, Any], held: Iterable[Lease]) -> Renewal:
        """Tells that the worker is alive. ``lost``: pieces that are no longer its own."""
        keys = self._keys
        pairs = [part for lease in held for part in (lease.piece, lease.token)]
        state, leave, *lost = self._renew(
            keys=[keys.record, keys.leases, keys.holders, keys.workers, keys.draining,
                  keys.quarantine, keys.placed, CLEARANCES, keys.refused, keys.events, keys.open],
            args=[self._worker, self._lease_ms, json.dumps(heartbeat), self._pass, *pairs],
        )  # fmt: skip
        return Renewal(state.decode(), leave.decode(), frozenset(piece.decode() for piece in lost))

    def release(self, lease: Lease) -> bool:
        """Gives the piece of work back. False where it was no longer the worker's."""
        keys = self._keys
        return bool(
            self._release(
                keys=[keys.leases, keys.holders, keys.open],
                args=[self._worker, lease.token, lease.piece],
            )
        )

    def report_evaluation(self, lease: Lease, result: Mapping[str, Any]) -> bool:
        """Hands in the result of an evaluation. False where the lease was lost."""
        return self._hand_in(lease, self._keys.evaluations, str(lease.number), result)

    def report_facts(self, lease: Lease, facts: Mapping[str, Any]) -> bool:
        """Hands in what the first snapshot was made from. False where the lease was lost."""
        return self._hand_in(lease, self._keys.facts, "facts", facts)

    def _hand_in(self, lease: Lease, key: str, field: str, result: Mapping[str, Any]) -> bool:
        keys = self._keys
        return bool(
            self._report(
                keys=[keys.leases, keys.holders, key],
                args=[self._worker, lease.token, lease.piece, field, json.dumps(result)],
            )
        )


class Accounts:
    """What a parameter server tells the ledger about its shard; every call is idempotent.

    Raises :class:`~vcasgd.errors.Fenced` once a newer parameter server of the shard has spoken.
    """

    def __init__(self, ledger: RedisClient, job: str, shard: int = 0, shards: int = 1) -> None:
        self._ledger = ledger
        self._shard, self._shards = shard, shards
        keys = LedgerKeys(job)
        self._told = keys.shards
        self._keys = [keys.work, keys.leases, keys.holders, keys.open, keys.done,
                      keys.evaluations, keys.shards, keys.applied, keys.counters]  # fmt: skip
        self._account = ledger.script("ledger/account")
        self._reconcile = ledger.script("ledger/reconcile")

    def newest_token(self) -> int:
        """Of the parameter servers that have spoken; 0 before the first one."""
        return int(self._ledger.hget(self._told, f"{self._shard}:token") or 0)

    def account(
        self, token: int, version: int, finished: int, totals: str, done: Iterable[int]
    ) -> bool:
        """Subtasks that became done and epochs that are finished, up to a version.

        False where something newer is already known.
        """
        head = [self._shard, self._shards, token, version, finished, totals]
        return bool(self._account(keys=self._keys, args=[*head, *done]))

    def reconcile(
        self,
        token: int,
        version: int,
        finished: int,
        totals: str,
        done: Iterable[int],
        *,
        initialise: bool = False,
    ) -> int:
        """The whole applied record; returns how many subtasks were opened again."""
        head = [self._shard, self._shards, token, version, finished, totals, int(initialise)]
        return int(self._reconcile(keys=self._keys, args=[*head, *done]))
