"""Jobs in the ledger: records, states, failures, leases, and checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from vcasgd.errors import Conflict, JobUnreadable, NotFound, StoreFull
from vcasgd.learning.evaluation import EvaluationPoints
from vcasgd.logging import request_id
from vcasgd.spec.job import CHANGEABLE, JobSpec
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.events import EventLog, event_text
from vcasgd.store.ledger.job import (
    COUNTERS,
    Failure,
    JobRecord,
    JobState,
    as_count,
    no_such_job,
    read_failure,
    read_job,
    request_job,
)
from vcasgd.store.ledger.workers import JobWorkers
from vcasgd.store.pipeline import FULL_SHARE

log = logging.getLogger(__name__)

#: Seconds for which a repeated submission with the same Idempotency-Key is recognized.
IDEMPOTENCY_SECONDS = 7 * 24 * 3600
#: Failures kept for each job; older ones are dropped.
FAILURES_KEPT = 200
#: Jobs that are read in one round trip; leases must not wait long.
JOBS_AT_ONCE = 50
#: States of jobs that have not ended.
ACTIVE = tuple(state for state in JobState if not state.over)
#: Counters of work that the platform writes.
WORK = ("finished", "total", "per_epoch", "lead")
#: Start of fields of the work that name a tracker.
_EXPORTED = "exported:"
#: Characters of job IDs, without those that look alike.
_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"


class Jobs(EventLog):
    """All jobs of the fleet. Calls raise :class:`~vcasgd.errors.StoreUnavailable`."""

    def __init__(self, ledger: RedisClient) -> None:
        super().__init__(ledger)
        self._submit = ledger.script("ledger/submit")
        self._transition = ledger.script("ledger/transition")
        self._roll_back = ledger.script("ledger/roll_back")
        #: Workers of all jobs.
        self.workers = JobWorkers(ledger)

    # -- lifecycle ------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, package: str, *key: str, **options: Any) -> JobRecord:
        """Return the job of :meth:`submit_once`."""
        return self.submit_once(spec, package, *key, **options)[0]

    def submit_once(
        self,
        spec: JobSpec,
        package: str,
        idempotency_key: str | None = None,
        *,
        owner: str | None = None,
        owner_limit: int | None = None,
        encrypt: Callable[[str], str] | None = None,
    ) -> tuple[JobRecord, bool]:
        """Create a job of a user; return it, and True if this call created it.

        The same idempotency key of the user returns the same job. ``encrypt`` returns the secrets
        of the job with the ID that it gets, encrypted. Raises :class:`Conflict` if the key was used
        for another request, and :class:`~vcasgd.errors.StoreFull` near the ledger's memory limit.
        """
        suffix = "".join(secrets.choice(_LETTERS) for _ in range(6))
        job = f"{spec.name}-{suffix}"
        body = spec.model_dump_json()
        digest = hashlib.sha256(f"{body}|{package}".encode()).hexdigest()
        keys = LedgerKeys(job)
        work = {"finished": 0, "lead": spec.max_epoch_lead}
        if spec.known_subtasks and spec.subtasks_per_epoch:
            work |= {"total": spec.known_subtasks, "per_epoch": spec.subtasks_per_epoch}
        record = {
            "spec": body, "state": JobState.STARTING.value, "package": package,
            "created_at": time.time(), "labels": " ".join(spec.required_labels),
            "request": request_id(), "owner": owner, "owner_limit": owner_limit,
        }  # fmt: skip
        event = event_text("submitted", f"{spec.name} was submitted", {}, request_id())
        try:
            created, stored_digest = self._submit(
                keys=[names.idempotency(owner, idempotency_key or ""), names.JOBS, names.ACTIVE,
                      keys.record, keys.work, keys.open, keys.events, keys.secrets],
                args=[job, digest, IDEMPOTENCY_SECONDS if idempotency_key else 0, event,
                      FULL_SHARE, encrypt(job) if encrypt else "", len(work), *_flat(work),
                      *_flat(record)],
            )  # fmt: skip
        except StoreFull as error:
            raise StoreFull(
                "the ledger is at its memory limit and accepts no new jobs; running jobs continue",
                remedy="delete jobs that have ended (vcasgd delete JOB), or raise the maxmemory of "
                "the ledger's server",
            ) from error
        if stored_digest.decode() != digest:
            raise Conflict(
                "this Idempotency-Key was used for another job",
                remedy="use a new key for a new request",
            )
        return self.get(created.decode()), created.decode() == job

    def get(self, job: str) -> JobRecord:
        """Return a job. Raises :class:`NotFound`, :class:`~vcasgd.errors.JobUnreadable`."""
        # Not a transaction, which workers may not use.
        with self._ledger.pipeline() as pipe:
            request_job(pipe, job)
            return read_job(job, pipe.execute())

    def get_many(self, jobs: Iterable[str]) -> dict[str, JobRecord]:
        """Return several jobs in few round trips, without those that can't be read."""
        names, records = list(jobs), {}
        for first in range(0, len(names), JOBS_AT_ONCE):
            batch = names[first : first + JOBS_AT_ONCE]
            with self._ledger.pipeline(transaction=True) as pipe:
                for job in batch:
                    request_job(pipe, job)
                rows = pipe.execute()
            for number, job in enumerate(batch):
                own = rows[number * len(rows) // len(batch) :][: len(rows) // len(batch)]
                try:
                    records[job] = read_job(job, own)
                except (JobUnreadable, NotFound) as error:
                    log.warning("%s", error)
        return records

    def all(
        self,
        states: Collection[JobState] = tuple(JobState),
        limit: int | None = None,
        after: str | None = None,
        prefix: str = "",
    ) -> list[JobRecord]:
        """Return the readable jobs in one of the states, newest first.

        ``after``: return only jobs that are older than this one, or than its :meth:`place`. Its ID
        raises :class:`NotFound` if it was deleted. ``prefix``: start of their IDs.
        """
        ids = self._older(after) if after else self.newest(0)
        ids = [job for job in ids if job.startswith(prefix)]
        if not any(state.over for state in states):
            active = set(self.active())
            ids = [job for job in ids if job in active]
        found: list[JobRecord] = []
        for first in range(0, len(ids), JOBS_AT_ONCE):
            jobs = self.get_many(ids[first : first + JOBS_AT_ONCE]).values()
            found += [job for job in jobs if job.state in states]
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    def _older(self, job: str) -> list[str]:
        job, _, at = job.partition("@")
        place = self._ledger.zrevrank(names.JOBS, job)
        if place is None and at.isdecimal():
            older = self._ledger.zrevrangebyscore(names.JOBS, f"({at}", "-inf")
            return [each.decode() for each in older]
        if place is None:
            raise NotFound(
                f"there is no job {job} to continue after",
                remedy="it may have been deleted; list the jobs from the start",
            )
        return [each.decode() for each in self._ledger.zrevrange(names.JOBS, place + 1, -1)]

    def place(self, job: str) -> str:
        """Return the ID of a job with its place in the list, which stays if it is deleted."""
        at = self._ledger.zscore(names.JOBS, job)
        return job if at is None else f"{job}@{at:.0f}"

    def newest(self, most: int) -> list[str]:
        """Return the IDs of the newest jobs, newest first; of all jobs if ``most`` is 0."""
        return [job.decode() for job in self._ledger.zrevrange(names.JOBS, 0, most - 1)]

    def deleted(self, most: int) -> list[str]:
        """Return the IDs of the ``most`` jobs that were deleted last, within some minutes."""
        return [job.decode() for job in self._ledger.zrevrange(names.DELETED, 0, most - 1)]

    def states(self) -> Counter[JobState]:
        records = (LedgerKeys(job).record for job in self.newest(0))
        values = self._ledger.of_each("HGET", records, "state")
        names = {state.value.encode(): state for state in JobState}
        return Counter(names[value] for value in values if value in names)

    def is_over(self, job: str) -> bool:
        """Return True if a job has ended, or was deleted in the last minutes."""
        value = self._ledger.hget(LedgerKeys(job).record, "state")
        return self.was_deleted(job) if value is None else JobState(value.decode()).over

    def was_deleted(self, job: str) -> bool:
        """Return True if a job was deleted in the last minutes."""
        return self._ledger.zscore(names.DELETED, job) is not None

    def active(self) -> list[str]:
        """Return the IDs of jobs that have not ended, in order of submission."""
        active = sorted(self._ledger.smembers(names.ACTIVE))
        submitted = self._ledger.zmscore(names.JOBS, active) if active else []
        order = sorted(
            (at, job) for at, job in zip(submitted, active, strict=True) if at is not None
        )
        return [job.decode() for _, job in order]

    def active_since(self, at: float) -> list[str]:
        """Return the IDs of jobs that have not ended, or not before ``at`` (the ledger's Unix
        seconds), at most a day ago."""
        active = self.active()  # First: a job that ends now is then in both lists.
        ended = self._ledger.zrangebyscore(names.ENDED, int(at), "+inf")
        return list(dict.fromkeys([*active, *(job.decode() for job in ended)]))

    def transition(
        self, job: str, to: JobState, allowed: Iterable[JobState], *, why: str, **fields: Any
    ) -> bool:
        """Change the state if the current one is allowed, and record an event.

        Returns False if it was not. Raises :class:`NotFound`.
        """
        extra: dict[str, Any] = {"reason": why, **fields}
        if to.over:
            extra.setdefault("ended_at", time.time())
        return self._set(job, extra, allowed, f"job-{to.value}", why, to=to)[0]

    def _set(
        self,
        job: str,
        fields: Mapping[str, Any],
        allowed: Iterable[JobState],
        kind: str,
        why: str,
        *,
        to: JobState | None = None,
        **details: Any,
    ) -> tuple[bool, str]:
        """Set fields of a job, and its state, in a state that is allowed, with an event.

        Returns whether the state was allowed, and the state. Raises :class:`NotFound`.
        """
        keys = LedgerKeys(job)
        event = event_text(kind, why, details, self.request_of(job))
        changed, state = self._transition(
            keys=[keys.record, names.ACTIVE, names.ENDED, keys.events,
                  keys.secrets, keys.secret_requests, keys.secret_answers],
            args=[job, to or "", int(to is not None and to.over), event, len(fields),
                  *_flat(fields), *allowed],
        )  # fmt: skip
        if not state:
            raise no_such_job(job)
        return bool(changed), state.decode()

    def set_waiting(self, reasons: Mapping[str, Mapping[str, Any]]) -> None:
        """Record why several jobs have fewer machines than they could use, as the plan says it.

        A job with an empty mapping has all of them.
        """
        with self._ledger.pipeline() as pipe:
            for job, reason in reasons.items():
                row = {"waiting": reason.get("text", ""), "queue": json.dumps(dict(reason))}
                pipe.hset(LedgerKeys(job).work, mapping=row)
            pipe.execute()

    def set_outlook(self, job: str, text: str) -> None:
        """Record the outlook of a job on its deadline, for people."""
        self._ledger.hset(LedgerKeys(job).work, "outlook", text)

    def note(self, job: str, name: str, text: str, **details: Any) -> None:
        """Announce what a job does otherwise than one process would, and keep it for its page.

        ``name`` is that of the event; a later note replaces the text. One thread of the controller
        writes those of a job.
        """
        self.announce(job, name, name, text, **details)
        key = LedgerKeys(job).work
        notes = json.loads(self._ledger.hget(key, "notes") or b"{}")
        if notes.get(name) != text:
            self._ledger.hset(key, "notes", json.dumps({**notes, name: text}))

    def set_exported(self, job: str, tracker: str) -> None:
        """Record that a tracker has the whole history of a job that has ended."""
        self._ledger.hset(LedgerKeys(job).work, f"{_EXPORTED}{tracker}", 1)

    def exported(self, job: str) -> set[str]:
        """Return the trackers of :meth:`set_exported`."""
        names = (name.decode() for name in self._ledger.hkeys(LedgerKeys(job).work))
        return {name.removeprefix(_EXPORTED) for name in names if name.startswith(_EXPORTED)}

    def set_plan(self, job: str, points: EvaluationPoints, most_workers: int | None = None) -> None:
        """Record the job's division into subtasks, and the kind of its evaluation points.

        Workers lease the subtasks once the job is running, at most ``most_workers`` at a time.
        """
        plan = points.plan
        work = {
            "total": plan.total_subtasks, "per_epoch": plan.subtasks_per_epoch,
            "points": "epochs" if points.at_epochs else "samples",
            "most_workers": most_workers or 0,
        }  # fmt: skip
        self._ledger.hset(LedgerKeys(job).work, mapping=work)

    def roll_back(
        self,
        job: str,
        number: int,
        checkpoint: str,
        why: str,
        *,
        restorations: int = 0,
        undone: Sequence[str] | None = None,
        **details: Any,
    ) -> bool:
        """Make a job's training go back to a checkpoint, for the ``number``-th time, with an event.

        ``undone``: the owners whose work is undone, so that the samples since then are trained
        again; ``restorations`` is how often. Without, the samples stay applied. The parameter
        servers do this with each model that is not rolled back so often. Returns
        False if it is recorded already, or if the job is not running.
        """
        keys = LedgerKeys(job)
        event = event_text("rolled-back", why, details, self.request_of(job))
        fields = {"rollback_to": checkpoint, "restores": undone is not None}
        if undone is not None:
            fields |= {"restorations": restorations, "undone": list(undone)}
        return bool(
            self._roll_back(
                keys=[keys.record, keys.tuning, keys.events],
                args=[number, event, *_flat({n: json.dumps(v) for n, v in fields.items()})],
            )
        )

    def pause(self, job: str) -> JobRecord:
        """Pause a job. Raises :class:`Conflict` if it is not running."""
        return self._command(job, JobState.PAUSED, (JobState.RUNNING,), "paused by request")

    def resume(self, job: str, *, max_cost_usd: float | None = None) -> JobRecord:
        """Resume a paused job, optionally with another budget.

        Raises :class:`Conflict` if it is not paused, also if it runs with another budget.
        """
        current, fields = self.get(job), {}
        if max_cost_usd is not None:
            stop = current.spec.stop.model_copy(update={"max_cost_usd": max_cost_usd})
            fields["spec"] = current.spec.model_copy(update={"stop": stop}).model_dump_json()
        # the budget may have been used up before the controller started the training
        started = current.state is not JobState.PAUSED or current.started_at is not None
        to = JobState.RUNNING if started else JobState.STARTING
        resumed = self._command(job, to, (JobState.PAUSED,), "resumed by request", **fields)
        if max_cost_usd not in (None, resumed.spec.stop.max_cost_usd):
            raise Conflict(
                f"job {job} {resumed.state.phrase}, so its budget stays as it is",
                remedy="pause it, and then resume it with the budget",
            )
        return resumed

    def change(self, job: str, fields: Mapping[str, Any]) -> JobRecord:
        """Change some of the fields :data:`CHANGEABLE` of a job; their values must be valid.

        Raises :class:`NotFound`, and :class:`Conflict` if the job has ended.
        """
        assert fields.keys() <= set(CHANGEABLE)
        stored = {name: json.dumps(value) for name, value in fields.items()}
        text = ", ".join(f"{name} is now {value}" for name, value in fields.items())
        changed, state = self._set(job, stored, ACTIVE, "changed", text, **fields)
        if not changed:
            remedy = "only a job that has not ended can be changed"
            raise Conflict(f"job {job} {JobState(state).phrase}", remedy=remedy)
        return self.get(job)

    def cancel(self, job: str) -> JobRecord:
        """Cancel a job. Raises :class:`Conflict` if it has ended."""
        return self._command(job, JobState.CANCELLED, ACTIVE, "cancelled by request")

    def _command(
        self, job: str, to: JobState, allowed: Sequence[JobState], why: str, **fields: Any
    ) -> JobRecord:
        if not self.transition(job, to, allowed, why=why, **fields):
            state = self.get(job).state
            if state is not to:
                raise Conflict(
                    f"job {job} {state.phrase}",
                    remedy="submit it again, or extend it"
                    if state.over
                    else f"this is possible while it is {' or '.join(allowed)}",
                )
        return self.get(job)

    # -- failures ------------------------------------------------------------------------------

    def report_failure(self, job: str, failure: Failure) -> None:
        """Record an error of the user's code, with the time and the model's version."""
        key = LedgerKeys(job).failures
        with self._ledger.pipeline() as pipe:
            pipe.time()
            pipe.hget(LedgerKeys(job).shards, "0:version")
            (seconds, _), version = pipe.execute()
        failure = replace(failure, at=float(seconds), version=as_count(version))
        with self._ledger.pipeline() as pipe:
            pipe.rpush(key, json.dumps(asdict(failure)))
            pipe.ltrim(key, -FAILURES_KEPT, -1)
            pipe.execute()

    def now(self) -> float:
        """Return the Unix time of the ledger, in seconds."""
        return self._ledger.now()

    def failures(self, job: str) -> list[Failure]:
        """Return the errors of the user's code, oldest first."""
        rows = self._ledger.lrange(LedgerKeys(job).failures, 0, -1)
        return [failure for each in rows if (failure := read_failure(each)) is not None]

    def report_invalid(self, job: str, shard: int, why: str) -> None:
        """Report that a shard's content, which workers stored, can't be read."""
        self._ledger.hset(LedgerKeys(job).shards, f"{shard}:invalid", why)

    # -- leases of all workers -----------------------------------------------------------------

    def leases(self, job: str) -> dict[str, str]:
        """Return the holder of each leased work item."""
        holders = self._ledger.hgetall(LedgerKeys(job).holders)
        return {
            piece.decode(errors="replace"): holder.decode(errors="replace").rpartition("|")[0]
            for piece, holder in holders.items()
        }

    def work(self, job: str) -> dict[str, int]:
        """Return the counters of leases, such as next, finished, and expired.

        Until the job's plan is set, total and per_epoch can be missing.
        """
        return self.work_of([job])[job]

    def work_of(self, jobs: Collection[str]) -> dict[str, dict[str, int]]:
        """Return :meth:`work` of several jobs, in one round trip."""
        with self._ledger.pipeline() as pipe:
            for job in jobs:
                keys = LedgerKeys(job)
                pipe.hgetall(keys.work)
                pipe.hmget(keys.counters, *COUNTERS)
            rows = pipe.execute()
        return {
            job: _work(work, counters)
            for job, work, counters in zip(jobs, rows[::2], rows[1::2], strict=True)
        }

    # -- checkpoints ---------------------------------------------------------------------------

    def set_checkpoints(self, job: str, checkpoints: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the list of checkpoints that exist in object storage."""
        key = LedgerKeys(job).checkpoints
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            if checkpoints:
                pipe.hset(
                    key, mapping={name: json.dumps(each) for name, each in checkpoints.items()}
                )
            pipe.execute()

    def checkpoints(self, job: str) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the job's checkpoints, by name."""
        rows = self._ledger.hgetall(LedgerKeys(job).checkpoints)
        return {name.decode(): json.loads(row) for name, row in sorted(rows.items())}


def _work(work: Mapping[bytes, bytes], counters: Sequence[bytes | None]) -> dict[str, int]:
    totals = {name: int(work[name.encode()]) for name in WORK if name.encode() in work}
    pairs = zip(COUNTERS, counters, strict=True)
    counts = {name: as_count(value) for name, value in pairs if value is not None}
    return totals | {"next": 0} | counts


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [
        part for name, value in fields.items() for part in (name, "" if value is None else value)
    ]
