"""Jobs in the ledger: their records, states, workers, and what people and loops say of them."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from vcasgd.errors import Conflict, JobUnreadable, NotFound
from vcasgd.logging import request_id
from vcasgd.spec.job import JobSpec
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.events import EventLog, event_text
from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.job import Failure, JobRecord, JobState, read_failure, read_job
from vcasgd.store.ledger.tuning import Tuned
from vcasgd.store.ledger.untrusted import as_count, as_name

log = logging.getLogger(__name__)

#: how long a repeated submission with the same Idempotency-Key is recognised
IDEMPOTENCY_SECONDS = 7 * 24 * 3600
#: of a job; older ones are dropped
FAILURES_KEPT = 200
#: of the lease table, as workers write them
COUNTERS = ("next", "tokens", "expired")
#: letters without those that are easily taken for one another
_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"


class Jobs(EventLog):
    """All jobs of the fleet."""

    def __init__(self, ledger: RedisClient) -> None:
        super().__init__(ledger)
        self._submit = ledger.script("ledger/submit")
        self._transition = ledger.script("ledger/transition")

    # -- life ----------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, package: str, idempotency_key: str | None = None) -> JobRecord:
        """Creates a job; the same key again gives the same job.

        Raises :class:`Conflict` where the key was used for something else.
        """
        return self.submit_once(spec, package, idempotency_key)[0]

    def submit_once(
        self, spec: JobSpec, package: str, idempotency_key: str | None = None
    ) -> tuple[JobRecord, bool]:
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
            "spec": body, "state": JobState.STARTING.value, "package": package,
            "created_at": time.time(), "labels": " ".join(spec.required_labels),
            "request": request_id(),
        }  # fmt: skip
        event = event_text("submitted", f"{spec.name} was submitted", {}, request_id())
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

    def get(self, job: str) -> JobRecord:
        """Raises :class:`NotFound`, :class:`~vcasgd.errors.JobUnreadable`."""
        keys = LedgerKeys(job)
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.record)
            pipe.hget(keys.facts, "facts")
            pipe.hget(keys.work, "finished")
            pipe.hgetall(keys.shards)
            pipe.hgetall(keys.evaluations)
            pipe.hvals(keys.vanished)
            pipe.hgetall(keys.tuning)
            record, facts, finished, told, evaluations, vanished, tuned = pipe.execute()
        if not record:
            raise NotFound(f"there is no job {job}", status=404)
        lost = [each.decode() for each in vanished]
        try:
            found = read_job(job, record, facts, int(finished or 0), told, evaluations, lost)
            return replace(found, tuned=Tuned.of(tuned))
        except (ValueError, TypeError, KeyError) as error:
            raise JobUnreadable(f"what is stored of job {job} makes no sense: {error}") from error

    def all(
        self, states: Collection[JobState] = tuple(JobState), limit: int | None = None
    ) -> list[JobRecord]:
        """Those in one of the states, newest first."""
        found = self._readable(job.decode() for job in self._ledger.zrevrange(names.JOBS, 0, -1))
        return list(islice((job for job in found if job.state in states), limit))

    def _readable(self, jobs: Iterable[str]) -> Iterator[JobRecord]:
        for job in jobs:
            try:
                yield self.get(job)
            except JobUnreadable as error:
                log.warning("%s", error)

    def newest(self, most: int) -> list[str]:
        """Their names, the newest first; 0: of all."""
        return [job.decode() for job in self._ledger.zrevrange(names.JOBS, 0, most - 1)]

    def states(self) -> Counter[JobState]:
        """How many jobs are in each."""
        with self._ledger.pipeline() as pipe:
            for job in self.newest(0):
                pipe.hget(LedgerKeys(job).record, "state")
            found = pipe.execute()
        known = {state.value.encode(): state for state in JobState}
        return Counter(known[state] for state in found if state in known)

    def active(self) -> list[str]:
        """Jobs that are not over, in order of submission."""
        active = self._ledger.smembers(names.ACTIVE)
        return [job.decode() for job in self._ledger.zrange(names.JOBS, 0, -1) if job in active]

    def transition(
        self, job: str, to: JobState, allowed: Iterable[JobState], *, why: str, **fields: Any
    ) -> bool:
        """Changes the state if the present one is allowed; says so in an event.

        Returns False where it was not. Raises :class:`NotFound`.
        """
        keys = LedgerKeys(job)
        extra: dict[str, Any] = {"reason": why, **fields}
        if to.over:
            extra.setdefault("ended_at", time.time())
        event = event_text(f"job-{to.value}", why, {}, self._request(job))
        changed, state = self._transition(
            keys=[keys.record, names.ACTIVE, keys.events],
            args=[job, to.value, int(to.over), event, len(extra), *_flat(extra), *allowed],
        )
        if not state:
            raise NotFound(f"there is no job {job}", status=404)
        return bool(changed)

    def pause(self, job: str) -> JobRecord:
        """Raises :class:`Conflict` where the job is not running."""
        return self._command(job, JobState.PAUSED, (JobState.RUNNING,), "paused by request")

    def resume(self, job: str, *, max_cost_usd: float | None = None) -> JobRecord:
        """With another budget if one is given. Raises :class:`Conflict` where the job is not
        paused."""
        present, fields = self.get(job), {}
        if max_cost_usd is not None:
            stop = present.spec.stop.model_copy(update={"max_cost_usd": max_cost_usd})
            fields["spec"] = present.spec.model_copy(update={"stop": stop}).model_dump_json()
        # its budget may have ended before there was a first snapshot
        begun = present.state is not JobState.PAUSED or present.facts is not None
        to = JobState.RUNNING if begun else JobState.STARTING
        return self._command(job, to, (JobState.PAUSED,), "resumed by request", **fields)

    def cancel(self, job: str) -> JobRecord:
        """Raises :class:`Conflict` where the job is over."""
        allowed = tuple(state for state in JobState if not state.over)
        return self._command(job, JobState.CANCELLED, allowed, "cancelled by request")

    def _command(
        self, job: str, to: JobState, allowed: Iterable[JobState], why: str, **fields: Any
    ) -> JobRecord:
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

    # -- workers -------------------------------------------------------------------------------

    def workers(self, job: str) -> dict[str, Heartbeat]:
        """Return the last heartbeat of each worker of a job, without those that can't be read."""
        stored = self._ledger.hgetall(LedgerKeys(job).workers)
        rows = ((as_name(worker), Heartbeat.parse(text)) for worker, text in stored.items())
        return {name: beat for name, beat in rows if name is not None and beat is not None}

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
        return [failure for each in found if (failure := read_failure(each)) is not None]

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


def _pairs(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, "" if value is None else value) for name, value in fields.items()]


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for pair in _pairs(fields) for part in pair]
