"""Leases and evaluations of work items, and lost workers. Deadlines use the ledger's clock."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vcasgd.logging import isolated
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import CLEARANCES, LedgerKeys
from vcasgd.store.ledger.job import as_count
from vcasgd.store.pipeline import mapped_errors

#: Subtasks that an idle worker has trained since another one leased the subtask that it takes over.
OVERTAKING = 2
#: Start of the reason if a worker gets no work because its pool lacks a clearance.
UNCLEARED = "not cleared"
#: Lost workers in one call of the script, and losses of a job that are kept.
MAX_LOST, MAX_LOSSES_KEPT = 500, 2000


class WorkKind(StrEnum):
    """Kind of a work item."""

    INITIALISE = "initialise"
    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class Lease:
    """The right to do one work item; ``token`` grows with every lease of the job."""

    kind: WorkKind
    number: int
    token: int

    @property
    def piece(self) -> str:
        """The work item's name in the ledger, such as ``train:3``."""
        return f"{self.kind}:{self.number}"


@dataclass(frozen=True)
class Wait:
    """No work for this worker at the moment, and the reason."""

    reason: str

    @property
    def quarantined(self) -> bool:
        return self.reason == "quarantined"

    @property
    def uncleared(self) -> bool:
        """True if the worker's pool is not cleared for the job's data."""
        return self.reason.startswith(UNCLEARED)


@dataclass(frozen=True)
class Renewal:
    """Answer to a heartbeat.

    ``state`` is the job's state. ``leave`` is the reason to leave, or empty. ``lost`` are the
    work items that the worker no longer holds.
    """

    state: str
    leave: str
    lost: frozenset[str]

    @property
    def uncleared(self) -> bool:
        return self.leave.startswith(UNCLEARED)


class Leases:
    """Leases of one worker of one job.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated: an acquired
    lease whose answer was lost expires by itself. ``lease_pass`` authenticates the worker; see
    :class:`~vcasgd.store.ledger.placement.Clearances`.
    """

    def __init__(
        self, ledger: RedisClient, job: str, worker: str, lease_seconds: float, lease_pass: str = ""
    ) -> None:
        self._ledger = ledger
        self._keys = LedgerKeys(job)
        self._pass = lease_pass
        self._worker = worker
        self._lease_ms = int(lease_seconds * 1000)
        #: Tokens of the last subtasks.
        self._trained: deque[int] = deque(maxlen=OVERTAKING)
        self._acquire = ledger.script("ledger/acquire")
        self._renew = ledger.script("ledger/renew")
        self._end = ledger.script("ledger/end")

    def acquire(self, only: WorkKind | None = None, *, idle: bool = False) -> Lease | Wait:
        """Lease the next work item, optionally ``only`` of one kind.

        ``idle``: everything that this worker trained is applied. If there is nothing else to do, it
        then takes over the subtask of one that is lost or much slower; the token makes that safe.
        """
        keys = self._keys
        before = self._trained[0] if idle and len(self._trained) == OVERTAKING else 0
        answer = self._acquire(
            keys=[keys.record, keys.work, keys.leases, keys.holders, keys.open, keys.quarantine,
                  keys.blocks, keys.counters, keys.placed, CLEARANCES, keys.refused, keys.shards],
            args=[self._worker, self._lease_ms, only or "", self._pass, before],
        )  # fmt: skip
        if answer[0] == b"wait":
            return Wait(answer[1].decode())
        lease = Lease(WorkKind(answer[0].decode()), int(answer[1]), int(answer[2]))
        if lease.kind is WorkKind.TRAIN:
            self._trained.append(lease.token)
        return lease

    def renew(self, heartbeat: Mapping[str, Any], held: Iterable[Lease]) -> Renewal:
        """Send a heartbeat and renew the leases that are ``held``."""
        keys = self._keys
        pairs = [part for lease in held for part in (lease.piece, lease.token)]
        state, leave, *lost = self._renew(
            keys=[keys.record, keys.leases, keys.holders, keys.workers, keys.draining,
                  keys.quarantine, keys.placed, CLEARANCES, keys.refused, keys.open],
            args=[self._worker, self._lease_ms, json.dumps(heartbeat), self._pass, *pairs],
        )  # fmt: skip
        return Renewal(state.decode(), leave.decode(), frozenset(piece.decode() for piece in lost))

    def release(self, lease: Lease) -> bool:
        """Return a work item. Returns False if the worker no longer held it."""
        return self._end_lease(lease, self._keys.open)

    def report_evaluation(self, lease: Lease, result: Mapping[str, Any]) -> bool:
        """Store the result of an evaluation. Returns False if the lease was lost."""
        text = json.dumps(result)
        return self._end_lease(lease, self._keys.evaluations, str(lease.number), text)

    def report_facts(self, lease: Lease, facts: Mapping[str, Any]) -> bool:
        """Store the facts of the first snapshot. Returns False if the lease was lost."""
        return self._end_lease(lease, self._keys.facts, "facts", json.dumps(facts))

    def _end_lease(self, lease: Lease, key: str, *result: str) -> bool:
        return bool(
            self._end(
                keys=[self._keys.leases, self._keys.holders, key],
                args=[self._worker, lease.token, lease.piece, *result],
            )
        )


class Evaluations:
    """Evaluations of a job: open, leased, and done.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, ledger: RedisClient, job: str) -> None:
        self._ledger = ledger
        self._keys = LedgerKeys(job)

    def read(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the numbers of pending evaluations, which are open or leased, and of done ones."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.zrange(self._keys.open, 0, -1)
            pipe.zrange(self._keys.leases, 0, -1)
            pipe.hkeys(self._keys.evaluations)
            waiting, leased, done = pipe.execute()
        pieces = [piece.partition(b":") for piece in (*waiting, *leased)]
        kind = WorkKind.EVALUATE.encode()
        pending = frozenset(as_count(number) for name, _, number in pieces if name == kind)
        return pending, frozenset(map(as_count, done))

    def open(self, number: int, at: float) -> None:
        """Open an evaluation of the present model. ``at`` is the Unix time."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hset(self._keys.work, "evaluation_at", str(at))
            pipe.zadd(self._keys.open, {f"{WorkKind.EVALUATE}:{number}": -1}, nx=True)
            pipe.execute()

    def opened_at(self) -> float | None:
        """Return the time of the last :meth:`open`, or None."""
        at = self._ledger.hget(self._keys.work, "evaluation_at")
        return float(at) if at else None


class LostWorkers:
    """Workers that are known to be lost, as reported by all processes; for one thread.

    Their leases are free at once, and no round waits for them. Methods raise
    :class:`~vcasgd.errors.StoreUnavailable`.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._lose = ledger.script("ledger/lose")
        #: Number of the last loss that was read, by job.
        self._read: dict[str, float] = {}

    def report(self, workers: Mapping[str, Collection[str]]) -> int:
        """Free the leases of each job's lost workers; return how many there were. Idempotent.

        A worker that is alive after all loses them, trains on with others, and loses no update
        that it has pushed.
        """
        calls = [
            (job, names[at : at + MAX_LOST])
            for job, names in ((job, sorted(names)) for job, names in workers.items())
            for at in range(0, len(names), MAX_LOST)
        ]
        with self._ledger.pipeline() as pipe:
            for job, names in calls:
                keys = LedgerKeys(job)
                self._lose(
                    keys=[keys.record, keys.leases, keys.holders, keys.open, keys.lost],
                    args=[MAX_LOSSES_KEPT, *names],
                    client=pipe,
                )
            answers = pipe.execute(raise_on_error=False)
        freed = 0
        for (job, _), answer in zip(calls, answers, strict=True):
            # What the workers of one job wrote must not keep the leases of another one.
            with isolated(job), mapped_errors():
                if isinstance(answer, Exception):
                    raise answer
                freed += answer
        return freed

    def news(self, jobs: Collection[str]) -> dict[str, frozenset[str]]:
        """Return the workers that were lost since the last call, by job, in one round trip.

        The first call for a job returns all that are kept, so a worker can be back since then.
        """
        self._read = {job: self._read.get(job, 0.0) for job in jobs}
        with self._ledger.pipeline() as pipe:
            for job, last in self._read.items():
                pipe.zrange(LedgerKeys(job).lost, last, "inf", byscore=True, withscores=True)
            answers = pipe.execute()
        news = {}
        for job, rows in zip(self._read, answers, strict=True):
            # Without the number that was read last, the ledger went back to an older state.
            last, self._read[job] = self._read[job], max((at for _, at in rows), default=0.0)
            if lost := frozenset(name.decode() for name, at in rows if name and at > last):
                news[job] = lost
        return news
