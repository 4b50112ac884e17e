"""Jobs in the ledger: their records, states, events, and what people and loops say of them."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from vcasgd.correlation import request_id
from vcasgd.errors import Conflict, JobUnreadable, NotFound
from vcasgd.spec import JobSpec
from vcasgd.store import keys as names
from vcasgd.store.connection import Client
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.progress import Progress
from vcasgd.store.untrusted import as_count, as_name, as_object

log = logging.getLogger(__name__)

#: how long a repeated submission with the same Idempotency-Key is recognised
IDEMPOTENCY_SECONDS = 7 * 24 * 3600
#: entries kept of each stream; older ones are dropped
EVENTS_KEPT = 20_000
#: more than a day, at a point each second
METRICS_KEPT = 100_000
LOG_LINES_KEPT = 10_000
FAILURES_KEPT = 200
#: of a job; a script on the ledger goes through them
MOST_SHARDS = 1024
#: of the lease table, as workers write them
COUNTERS = ("next", "tokens", "expired")
#: letters without those that are easily taken for one another
_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"


class State(StrEnum):
    """``starting`` → ``running`` ⇄ ``paused`` → ``finishing`` → one of the last three."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHING = "finishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)


@dataclass(frozen=True)
class Facts:
    """What only the user's code knows; found out by the worker that made the first snapshot."""

    samples: int
    validation_samples: int
    #: the model's :class:`~vcasgd.learning.vector.Layout` as JSON
    layout: str
    order_digest: str
    #: into how many the vector is cut, shard k on store node k; the same for the job's life
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS)] = 1

    @classmethod
    def from_json(cls, text: str | bytes) -> Facts:
        """Raises :class:`ValueError`."""
        return _FACTS.validate_json(text)

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "validation_samples": self.validation_samples,
            "layout": self.layout,
            "order_digest": self.order_digest,
            "shards": self.shards,
        }


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation on the validation split."""

    epoch: int
    version: int
    metrics: dict[str, float]
    worker: str
    seconds: float
    at: float
    #: of the model in each shard; ``version`` is that of the first
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """A job as the ledger has it. Times are Unix seconds."""

    id: str
    spec: JobSpec
    state: State
    package: str
    created_at: float
    #: of the request that submitted it
    request: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    reason: str | None = None
    traceback: str | None = None
    facts: Facts | None = None
    #: cumulative, from the snapshots: updates, samples, staleness_sum, staleness_max, …
    totals: dict[str, Any] = field(default_factory=dict)
    finished_epochs: int = 0
    version: int = 0
    evaluations: tuple[Evaluation, ...] = ()
    #: the epoch whose model the job ends with, from `finishing` on
    final_epoch: int | None = None
    #: the checkpoint that holds the finished model
    model: str | None = None
    #: machines that the job lost: with a notice, and without
    evictions: int = 0
    kills: int = 0

    @property
    def best(self) -> Evaluation | None:
        return max(
            self.evaluations, key=lambda each: each.metrics.get("accuracy", -1.0), default=None
        )


@dataclass(frozen=True)
class Failure:
    """An error of the user's code; ``fatal``: no other machine will do better."""

    worker: str
    piece: str
    message: str
    traceback: str
    fatal: bool


_FACTS, _FAILURE = TypeAdapter(Facts), TypeAdapter(Failure)
_EVALUATION = TypeAdapter(Evaluation)


class Jobs:
    """All jobs of the fleet."""

    def __init__(self, ledger: Client) -> None:
        self._ledger = ledger
        self._submit = ledger.script("submit")
        self._transition = ledger.script("transition")

    # -- life ----------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, package: str, idempotency_key: str | None = None) -> Job:
        """Creates a job; the same key again gives the same job.

        Raises :class:`Conflict` where the key was used for something else.
        """
        return self.submit_once(spec, package, idempotency_key)[0]

    def submit_once(
        self, spec: JobSpec, package: str, idempotency_key: str | None = None
    ) -> tuple[Job, bool]:
        """As :meth:`submit`; also whether it was this call that created the job."""
        suffix = "".join(secrets.choice(_LETTERS) for _ in range(6))
        job = f"{spec.name}-{suffix}"
        body = spec.model_dump_json()
        digest = hashlib.sha256(f"{body}|{package}".encode()).hexdigest()
        keys = LedgerKeys(job)
        work = {
            "finished": 0, "total": spec.total_subtasks,
            "per_epoch": spec.subtasks_per_epoch, "lead": spec.max_epoch_lead,
        }  # fmt: skip
        record = {
            "spec": body, "state": State.STARTING.value, "package": package,
            "created_at": time.time(), "labels": " ".join(spec.required_labels),
            "request": request_id(),
        }  # fmt: skip
        event = _event("submitted", f"{spec.name} was submitted", {}, request_id())
        created, known_digest = self._submit(
            keys=[names.idempotency(idempotency_key or ""), names.JOBS, names.ACTIVE,
                  keys.record, keys.work, keys.open, keys.events],
            args=[job, digest, IDEMPOTENCY_SECONDS if idempotency_key else 0, event,
                  len(work), *_flat(work), *_flat(record)],
        )  # fmt: skip
        if known_digest.decode() != digest:
            raise Conflict(
                "this Idempotency-Key was used for another job",
                remedy="use a new key for a new request",
                status=409,
            )
        return self.get(created.decode()), created.decode() == job

    def get(self, job: str) -> Job:
        """Raises :class:`NotFound`, :class:`~vcasgd.errors.JobUnreadable`."""
        keys = LedgerKeys(job)
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.record)
            pipe.hget(keys.facts, "facts")
            pipe.hget(keys.work, "finished")
            pipe.hgetall(keys.shards)
            pipe.hgetall(keys.evaluations)
            pipe.hvals(keys.vanished)
            record, facts, finished, told, evaluations, vanished = pipe.execute()
        if not record:
            raise NotFound(f"there is no job {job}", status=404)
        lost = [each.decode() for each in vanished]
        try:
            return _job(job, record, facts, int(finished or 0), told, evaluations, lost)
        except (ValueError, TypeError, KeyError) as error:
            raise JobUnreadable(f"what is stored of job {job} makes no sense: {error}") from error

    def all(self, states: Collection[State] = tuple(State), limit: int | None = None) -> list[Job]:
        """Those in one of the states, newest first."""
        found = self._readable(job.decode() for job in self._ledger.zrevrange(names.JOBS, 0, -1))
        return list(islice((job for job in found if job.state in states), limit))

    def _readable(self, jobs: Iterable[str]) -> Iterator[Job]:
        for job in jobs:
            try:
                yield self.get(job)
            except JobUnreadable as error:
                log.warning("%s", error)

    def newest(self, most: int) -> list[str]:
        """Their names, the newest first; 0: of all."""
        return [job.decode() for job in self._ledger.zrevrange(names.JOBS, 0, most - 1)]

    def states(self) -> Counter[State]:
        """How many jobs are in each."""
        with self._ledger.pipeline() as pipe:
            for job in self.newest(0):
                pipe.hget(LedgerKeys(job).record, "state")
            found = pipe.execute()
        known = {state.value.encode(): state for state in State}
        return Counter(known[state] for state in found if state in known)

    def active(self) -> list[str]:
        """Jobs that are not over, in order of submission."""
        active = self._ledger.smembers(names.ACTIVE)
        return [job.decode() for job in self._ledger.zrange(names.JOBS, 0, -1) if job in active]

    def transition(
        self, job: str, to: State, allowed: Iterable[State], *, why: str, **fields: Any
    ) -> bool:
        """Changes the state if the present one is allowed; says so in an event.

        Returns False where it was not. Raises :class:`NotFound`.
        """
        keys = LedgerKeys(job)
        extra: dict[str, Any] = {"reason": why, **fields}
        if to.over:
            extra.setdefault("ended_at", time.time())
        event = _event(f"job-{to.value}", why, {}, self._request(job))
        changed, state = self._transition(
            keys=[keys.record, names.ACTIVE, keys.events],
            args=[job, to.value, int(to.over), event, len(extra), *_flat(extra), *allowed],
        )
        if not state:
            raise NotFound(f"there is no job {job}", status=404)
        return bool(changed)

    def pause(self, job: str) -> Job:
        """Raises :class:`Conflict` where the job is not running."""
        return self._command(job, State.PAUSED, (State.RUNNING,), "paused by request")

    def resume(self, job: str, *, max_cost_usd: float | None = None) -> Job:
        """With another budget if one is given. Raises :class:`Conflict` where the job is not
        paused."""
        present, fields = self.get(job), {}
        if max_cost_usd is not None:
            stop = present.spec.stop.model_copy(update={"max_cost_usd": max_cost_usd})
            fields["spec"] = present.spec.model_copy(update={"stop": stop}).model_dump_json()
        # its budget may have ended before there was a first snapshot
        begun = present.state is not State.PAUSED or present.facts is not None
        to = State.RUNNING if begun else State.STARTING
        return self._command(job, to, (State.PAUSED,), "resumed by request", **fields)

    def cancel(self, job: str) -> Job:
        """Raises :class:`Conflict` where the job is over."""
        allowed = tuple(state for state in State if not state.over)
        return self._command(job, State.CANCELLED, allowed, "cancelled by request")

    def _command(
        self, job: str, to: State, allowed: Iterable[State], why: str, **fields: Any
    ) -> Job:
        allowed = tuple(allowed)
        if not self.transition(job, to, allowed, why=why, **fields):
            state = self.get(job).state
            if state is not to:
                raise Conflict(
                    f"job {job} is {state}",
                    remedy=f"possible while it is {' or '.join(allowed)}",
                    status=409,
                )
        return self.get(job)

    # -- what happened -------------------------------------------------------------------------

    def event(self, job: str, kind: str, text: str, **details: Any) -> None:
        """Appends to the job's history. ``kind`` is short and stable, ``text`` for people."""
        self._ledger.xadd(
            LedgerKeys(job).events,
            {"e": _event(kind, text, details, self._request(job))},
            maxlen=EVENTS_KEPT,
            approximate=True,
        )

    def _request(self, job: str) -> str | None:
        """The one at work, else the one that submitted the job."""
        if (present := request_id()) is not None:
            return present
        return self.request_of(job)

    def request_of(self, job: str) -> str | None:
        """The request that submitted a job."""
        known = self._ledger.hget(LedgerKeys(job).record, "request")
        return known.decode() if known else None

    def events(
        self, job: str, after: str = "0", *, limit: int = 1000, wait_seconds: float = 0.0
    ) -> list[dict[str, Any]]:
        """Events after an id, oldest first; waits for the first one if asked to."""
        return self._read(LedgerKeys(job).events, "e", after, limit, wait_seconds)

    def metrics(self, job: str, after: str = "0", *, limit: int = 5000) -> list[dict[str, Any]]:
        """The totals over time, oldest first."""
        return self._read(LedgerKeys(job).metrics, "m", after, limit, 0.0)

    def add_metrics(self, job: str, values: Mapping[str, Any]) -> None:
        self._ledger.xadd(
            LedgerKeys(job).metrics,
            {"m": json.dumps(values)},
            maxlen=METRICS_KEPT,
            approximate=True,
        )

    def logs(
        self, job: str, after: str = "0", *, limit: int = 1000, wait_seconds: float = 0.0
    ) -> list[dict[str, Any]]:
        """Lines that workers printed, oldest first: ``worker``, ``at``, ``line``."""
        return self._read(LedgerKeys(job).logs, "l", after, limit, wait_seconds)

    def add_logs(self, job: str, worker: str, lines: Iterable[str]) -> None:
        with self._ledger.pipeline() as pipe:
            for line in lines:
                entry = json.dumps({"worker": worker, "at": time.time(), "line": line})
                pipe.xadd(LedgerKeys(job).logs, {"l": entry}, maxlen=LOG_LINES_KEPT)
            pipe.execute()

    def _read(
        self, key: str, name: str, after: str, limit: int, wait_seconds: float
    ) -> list[dict[str, Any]]:
        # a blocking read needs an answer within the connection's own time limit
        block = min(int(wait_seconds * 1000), 5000) or None
        found = self._ledger.xread({key: after}, count=limit, block=block)
        entries = found[0][1] if found else []
        return [{"id": at.decode(), **json.loads(data[name.encode()])} for at, data in entries]

    # -- workers -------------------------------------------------------------------------------

    def workers(self, job: str) -> dict[str, dict[str, Any]]:
        """The last heartbeat of each worker of a job."""
        found = self._ledger.hgetall(LedgerKeys(job).workers)
        read = ((as_name(worker), as_object(beat)) for worker, beat in found.items())
        return {name: beat for name, beat in read if name is not None and beat is not None}

    def worker_count(self, job: str) -> int:
        """Workers that were heard of and are not gone for good."""
        return int(self._ledger.hlen(LedgerKeys(job).workers))

    def forget_worker(self, job: str, worker: str) -> None:
        keys = LedgerKeys(job)
        with self._ledger.pipeline() as pipe:
            pipe.hdel(keys.workers, worker)
            pipe.srem(keys.draining, worker)
            pipe.execute()

    def drain(self, job: str, worker: str) -> None:
        """Asks a worker to push what it has, to give back the rest, and to leave."""
        self._ledger.sadd(LedgerKeys(job).draining, worker)

    def draining(self, job: str) -> set[str]:
        """Workers that were asked to leave."""
        return {each.decode() for each in self._ledger.smembers(LedgerKeys(job).draining)}

    def quarantine(self, job: str, worker: str, why: str) -> bool:
        """A worker that is not to be trusted gets no more work. False where it was already."""
        return bool(self._ledger.hset(LedgerKeys(job).quarantine, worker, why))

    def quarantined(self, job: str) -> dict[str, str]:
        found = self._ledger.hgetall(LedgerKeys(job).quarantine)
        return {worker.decode(): why.decode() for worker, why in found.items()}

    def report_failure(self, job: str, failure: Failure) -> None:
        """An error of the user's code."""
        key = LedgerKeys(job).failures
        with self._ledger.pipeline() as pipe:
            pipe.rpush(key, json.dumps(asdict(failure)))
            pipe.ltrim(key, -FAILURES_KEPT, -1)
            pipe.execute()

    def failures(self, job: str) -> list[Failure]:
        """Errors of the user's code, oldest first."""
        found = self._ledger.lrange(LedgerKeys(job).failures, 0, -1)
        return [failure for each in found if (failure := _failure(each)) is not None]

    def vanished(self, job: str, instance: str, how: str) -> bool:
        """A machine of the job is gone: ``evicted`` (with a notice) or ``killed``.

        False where that was known.
        """
        return bool(self._ledger.hsetnx(LedgerKeys(job).vanished, instance, how))

    # -- leases, as seen from outside ----------------------------------------------------------

    def leases(self, job: str) -> dict[str, str]:
        """Who holds what: piece of work → worker."""
        found = self._ledger.hgetall(LedgerKeys(job).holders)
        return {
            piece.decode(): holder.decode().rpartition("|")[0] for piece, holder in found.items()
        }

    def work(self, job: str) -> dict[str, int]:
        """Counters of the lease table: next, finished, total, expired, …"""
        keys = LedgerKeys(job)
        with self._ledger.pipeline() as pipe:
            pipe.hgetall(keys.work)
            pipe.hmget(keys.counters, *COUNTERS)
            work, counters = pipe.execute()
        known = {name.decode(): int(value) for name, value in work.items()}
        found = zip(COUNTERS, counters, strict=True)
        return known | {"next": 0} | {name: as_count(at) for name, at in found if at is not None}

    # -- checkpoints ---------------------------------------------------------------------------

    def set_checkpoints(self, job: str, checkpoints: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces the list of checkpoints that exist in object storage."""
        key = LedgerKeys(job).checkpoints
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            if checkpoints:
                pipe.hset(
                    key, mapping={name: json.dumps(each) for name, each in checkpoints.items()}
                )
            pipe.execute()

    def checkpoints(self, job: str) -> dict[str, dict[str, Any]]:
        found = self._ledger.hgetall(LedgerKeys(job).checkpoints)
        return {name.decode(): json.loads(each) for name, each in sorted(found.items())}


def _event(kind: str, text: str, details: Mapping[str, Any], request: str | None) -> str:
    event = {"at": time.time(), "kind": kind, "text": text, "details": details}
    return json.dumps(event | ({"request": request} if request else {}))


def _failure(text: bytes) -> Failure | None:
    try:
        return _FAILURE.validate_json(text)
    except ValueError:
        return None


def _pairs(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, "" if value is None else value) for name, value in fields.items()]


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for pair in _pairs(fields) for part in pair]


def _job(
    job: str,
    record: dict[bytes, bytes],
    facts_text: bytes | None,
    finished: int,
    told: dict[bytes, bytes],
    evaluations: dict[bytes, bytes],
    vanished: list[str],
) -> Job:
    text = {name.decode(): value.decode() for name, value in record.items()}
    results = sorted(
        (_evaluation(int(epoch), json.loads(each)) for epoch, each in evaluations.items()),
        key=lambda each: each.epoch,
    )
    facts = Facts.from_json(facts_text) if facts_text is not None else None
    progress = Progress.of(told, facts.shards if facts else 1)
    return Job(
        id=job,
        spec=JobSpec.parse(json.loads(text["spec"])),
        state=State(text["state"]),
        package=text["package"],
        created_at=float(text["created_at"]),
        request=text.get("request") or None,
        started_at=_number(text.get("started_at")),
        ended_at=_number(text.get("ended_at")),
        reason=text.get("reason") or None,
        traceback=text.get("traceback") or None,
        facts=facts,
        totals=progress.totals,
        finished_epochs=finished,
        version=progress.version,
        evaluations=tuple(results),
        final_epoch=int(text["final_epoch"]) if text.get("final_epoch") else None,
        model=text.get("model") or None,
        evictions=vanished.count("evicted"),
        kills=vanished.count("killed"),
    )


def _evaluation(epoch: int, fields: dict[str, Any]) -> Evaluation:
    versions = tuple(fields.pop("versions", ())) or (fields["version"],)
    return _EVALUATION.validate_python({**fields, "epoch": epoch, "versions": versions})


def _number(text: str | None) -> float | None:
    return float(text) if text else None
