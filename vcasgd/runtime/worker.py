"""The worker: lease → fetch → train → push, until there is nothing left or it has to go.

A worker keeps nothing that can't be lost. It runs inside a Ray actor, or as a process of its
own with ``python -m vcasgd.runtime.worker --job JOB --worker NAME``.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from vcasgd.errors import (
    Fenced,
    NotFound,
    PackageError,
    SnapshotMissing,
    SpecError,
    StorageUnavailable,
    StoreUnavailable,
    UserCodeError,
    VcasgdError,
)
from vcasgd.package import unpack
from vcasgd.runtime.heart import (
    Heart,
    HeldLeases,
    LineCapture,
    NoticeLike,
    NoticeSource,
    NoticeWatch,
)
from vcasgd.runtime.learner import Learner
from vcasgd.runtime.names import epoch_pin
from vcasgd.runtime.outbox import Outbox
from vcasgd.runtime.processes import configure_logging, exit_status
from vcasgd.runtime.storage import Storage
from vcasgd.settings import Settings, load_settings
from vcasgd.store.connection import connect, patiently
from vcasgd.store.jobs import Evaluation, Failure, Job, Jobs, State
from vcasgd.store.keys import TensorKeys
from vcasgd.store.leases import Kind, Lease, Leases, Renewal, Wait
from vcasgd.store.snapshots import Meta, Record, Snapshot, Snapshots, encode_integers
from vcasgd.store.updates import Header, UpdateSender, checksum
from vcasgd.task import load_task

log = logging.getLogger(__name__)

#: pause when there is no work; and after an error of the user's code
IDLE_SECONDS = 0.2
FAILURE_SECONDS = 0.5
LONGEST_FAILURE_SECONDS = 30.0
#: subtasks that may wait to be applied before no more work is leased
MOST_AWAITED = 4
#: part of the time to an eviction that the flush may take; the rest is for the last words
FLUSH_SHARE = 0.8


class _Interrupted(Exception):
    pass


class Worker:
    """One learner at work for one job."""

    def __init__(
        self,
        settings: Settings,
        job: str,
        name: str,
        *,
        instance: str | None = None,
        notices: NoticeSource | None = None,
    ) -> None:
        self._settings = settings
        self._job = job
        self._name = name
        self._instance = instance
        ledger = connect(settings.secret("ledger_url"))
        tensors = connect(settings.secret("tensors_url"))
        keys = TensorKeys(job)
        self._jobs = Jobs(ledger)
        self._leases = Leases(ledger, job, name, settings.lease_seconds)
        self._snapshots = Snapshots(tensors, keys)
        self._sender = UpdateSender(tensors, keys)
        self._outbox = Outbox(self._sender, settings.patience_seconds)
        self._held = HeldLeases()
        self._again: dict[int, Lease] = {}
        self._current: Lease | None = None
        self._learner: Learner | None = None
        self._base_version: tuple[int, int] | None = None
        self._newest: tuple[int, int] | None = None

        self._leaving = threading.Event()
        self._why = ""
        self._state = State.STARTING.value
        self._notice: NoticeLike | None = None
        self._doing = "starting"
        self._steps = 0
        self._samples = 0
        self._progress_at = time.monotonic()
        self._pushes = 0
        self._failures = 0
        self._capture = LineCapture(self._jobs, job, name)
        self._heart = Heart(
            self._leases,
            self._held,
            period=settings.heartbeat,
            describe=self._describe,
            alive=self._alive,
            heard=self._heard,
            flush_logs=self._capture.flush,
        )
        self._watch = (
            NoticeWatch(notices, min(settings.heartbeat, 1.0), self._noticed) if notices else None
        )

    # -- life ----------------------------------------------------------------------------------

    def run(self) -> str:
        """Until the job is over or the worker has to go; returns why it went."""
        with self._capture.installed():
            self._heart.start()
            if self._watch:
                self._watch.start()
            try:
                while not self._leaving.is_set():
                    self._round()
            finally:
                self._go()
        log.info("%s leaves: %s", self._name, self._why)
        return self._why

    def leave(self, why: str) -> None:
        """Asks the worker to push what it has, give back the rest, and end."""
        if not self._leaving.is_set():
            self._why = why
            self._leaving.set()

    def _go(self) -> None:
        self._doing = "leaving"
        if self._watch:
            self._watch.stop()
        try:
            if not State(self._state).over and self._state != "gone":
                self._hand_over()
        except (StoreUnavailable, ValueError):
            log.warning("could not hand over; the leases will expire")
        self._outbox.close()
        self._doing = f"left: {self._why}"
        self._heart.stop()

    def _hand_over(self) -> None:
        """Pushes what is trained, then gives back what is not; in this order, so that whoever
        goes on finds the pushed part already there."""
        if self._outbox.unapplied:
            self._outbox.flush(self._seconds_left())
        unfinished = [lease for lease in (self._current, *self._again.values()) if lease]
        for lease in unfinished:
            if self._held.has(lease):
                self._leases.release(lease)
                self._held.drop(lease.piece)

    def _seconds_left(self) -> float:
        if self._notice and self._notice.at:
            return max(0.5, (self._notice.at - time.time()) * FLUSH_SHARE)
        return self._settings.lease_seconds

    def _round(self) -> None:
        try:
            self._work_once()
        except _Interrupted:
            pass
        except (UserCodeError, SpecError, PackageError) as error:
            self._report_failure(error)
        except (StoreUnavailable, SnapshotMissing, StorageUnavailable) as error:
            self._bear(error)
        except Fenced as error:
            log.info("%s", error)
            self._drop_current()

    def _bear(self, error: VcasgdError) -> None:
        """A server is away. Everything is kept; after too long a time the worker gives up."""
        log.debug("%s", error)
        silent = time.monotonic() - self._heart.last_answer
        if silent > self._settings.patience_seconds:
            self.leave(f"the ledger did not answer for {silent:.0f} s")
        if self._current is not None:
            self._again[self._current.number] = self._current
            self._current = None
        self._pause(IDLE_SECONDS)

    # -- choosing what to do -------------------------------------------------------------------

    def _work_once(self) -> None:
        if self._learner is None and self._state != State.STARTING:
            self._prepare()
        try:
            self._settle()
            lease = self._next_piece()
        except SnapshotMissing:
            # the parameter server brings it back, unless it was lost for good: then somebody
            # has to make the first one again, before any other work can go on
            lease = self._acquire(Kind.INITIALISE)
        if lease is None:
            return
        self._current = lease
        match lease.kind:
            case Kind.INITIALISE:
                self._initialise(lease)
            case Kind.EVALUATE:
                self._evaluate(lease)
            case Kind.TRAIN:
                self._train(lease)
        self._current = None

    def _next_piece(self) -> Lease | None:
        while self._again:
            _, lease = self._again.popitem()
            if self._held.has(lease):
                return lease
        if len(self._outbox.subtasks()) >= MOST_AWAITED:
            self._idle("waiting for the parameter server")
            return None
        found = self._acquire()
        if found and found.kind is not Kind.INITIALISE and self._learner is None:
            self._current = found
            self._prepare()
        return found

    def _acquire(self, only: Kind | None = None) -> Lease | None:
        answer = self._leases.acquire(only)
        if isinstance(answer, Wait):
            if answer.reason == "gone" or answer.quarantined:
                self.leave(answer.reason)
            self._idle(answer.reason)
            return None
        self._held.add(answer)
        return answer

    def _idle(self, reason: str) -> None:
        self._doing = f"idle: {reason}"
        self._pause(IDLE_SECONDS)

    def _pause(self, seconds: float) -> None:
        # waiting is no standstill of the user's code
        self._progress_at = time.monotonic()
        self._leaving.wait(seconds)

    # -- preparing -----------------------------------------------------------------------------

    def _prepare(self) -> Learner:
        """Fetches the user's code and builds the model, once."""
        if self._learner is None:
            self._doing = "preparing"
            job = self._jobs.get(self._job)
            learner = self._build(job)
            if job.facts is not None:
                learner.check_against(job.facts)
            self._learner = learner
        return self._learner

    def _build(self, job: Job) -> Learner:
        storage = Storage(self._settings.required("storage_url"))
        cache = Path(tempfile.gettempdir()) / f"vcasgd-packages-{os.getuid()}"
        if self._settings.cache_dir is not None:
            cache = self._settings.cache_dir
        if not (cache / job.package).is_dir():
            try:
                data = storage.get(f"packages/{job.package}.zip")
            except NotFound as error:
                raise PackageError(f"package {job.package[:12]} is not in the storage") from error
            unpack(data, job.package, cache)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        task = load_task(job.spec.task, job.spec.args, cache / job.package)
        return Learner(job.spec, task, device)

    def _initialise(self, lease: Lease) -> None:
        """Makes the first snapshot, and finds out what only the user's code knows."""
        learner = self._prepare()
        self._doing = "making the first snapshot"
        facts = learner.facts()
        learner.check_against(facts)
        # not what the learner holds, which is trained already where the model was lost
        floats, integers = learner.initial()
        meta = Meta(
            version=0,
            token=0,
            floats=learner.layout.floats,
            parameters=learner.layout.parameters,
            layout=learner.layout_digest,
            integers=encode_integers(integers),
            created_at=time.time(),
        )
        self._snapshots.install(0, meta, Record(), floats)
        self._leases.report_facts(lease, facts.to_dict())
        self._held.drop(lease.piece)
        self._base_version = None

    # -- training ------------------------------------------------------------------------------

    def _train(self, lease: Lease) -> None:
        learner = self._prepare()
        subtask, plan = lease.number, learner.plan
        epoch, size = plan.epoch_of(subtask), plan.size(subtask)
        position = max(
            self._sender.begin(subtask, epoch, size, lease.token),
            # what waits here to be pushed again need not be trained again
            self._outbox.reached(subtask, lease.token),
        )
        if position >= size:
            self._outbox.watch(subtask, epoch, size)
            return
        self._doing = f"training subtask {subtask}"
        learner.start_subtask()
        while position < size:
            self._outbox.wait_for_room(lambda: not self._may_go_on(lease), self._settle)
            self._refresh(learner)
            self._check_still_mine(lease)
            position = self._train_interval(learner, lease, epoch, position)

    def _train_interval(self, learner: Learner, lease: Lease, epoch: int, position: int) -> int:
        assert self._base_version is not None
        trained = learner.train(
            lease.number,
            position,
            should_stop=lambda: not self._may_go_on(lease),
            on_step=self._on_step,
        )
        self._failures = 0
        self._samples += trained.stop - position
        self._pushes += 1
        header = Header(
            update=f"{self._name}.{os.getpid()}.{self._pushes}",
            worker=self._name,
            subtask=lease.number,
            start=position,
            stop=trained.stop,
            base=self._base_version[0],
            token=lease.token,
            codec=learner.codec.name,
            size=len(trained.payload),
            checksum=checksum(trained.payload),
            layout=learner.layout_digest,
            integers=""
            if torch.equal(trained.integers, learner.base_integers)
            else encode_integers(trained.integers),
            loss_sum=trained.loss_sum,
        )
        self._outbox.submit(header, epoch, trained.payload)
        return trained.stop

    def _check_still_mine(self, lease: Lease) -> None:
        if lease.number in self._again:
            # a part of it was rejected or lost: find out anew where it stands
            raise _Interrupted
        if not self._may_go_on(lease):
            if not self._held.has(lease):
                self._drop_current()
            raise _Interrupted

    def _may_go_on(self, lease: Lease) -> bool:
        return self._held.has(lease) and not self._leaving.is_set()

    def _drop_current(self) -> None:
        if self._current is not None:
            self._held.drop(self._current.piece)
            self._outbox.forget(self._current.number)
            self._current = None

    def _refresh(self, learner: Learner) -> None:
        """The newest snapshot into the learner's base, if it is not there already."""
        self._settle()
        if self._base_version is not None and self._base_version == self._newest:
            return
        snapshot = self._snapshots.fetch(learner.base)
        learner.base_integers = snapshot.meta.integer_vector()
        self._base_version = (snapshot.meta.version, snapshot.meta.token)

    def _settle(self) -> None:
        """Looks what became of the pushed updates. Raises :class:`SnapshotMissing`."""
        if self._learner is None:
            return
        # waiting for the parameter server is no standstill of the user's code
        self._progress_at = time.monotonic()
        settled = self._outbox.settle()
        self._newest = settled.version
        for subtask, reason in settled.rejected:
            log.warning("an update of subtask %d was rejected: %s", subtask, reason)
        self._sort_leases(settled.rework)

    def _sort_leases(self, rework: frozenset[int]) -> None:
        unsettled = self._outbox.subtasks()
        for lease in self._held.all():
            if lease.kind is not Kind.TRAIN:
                continue
            if lease.number in rework:
                self._again[lease.number] = lease
            elif (
                lease != self._current
                and lease.number not in unsettled
                and lease.number not in self._again
            ):
                self._held.drop(lease.piece)

    # -- evaluation ----------------------------------------------------------------------------

    def _evaluate(self, lease: Lease) -> None:
        learner = self._prepare()
        self._doing = f"evaluating epoch {lease.number}"
        pinned, floats = self._pinned(lease)
        started = time.monotonic()
        metrics = learner.evaluate(
            floats,
            pinned.meta.integer_vector(),
            should_stop=lambda: not self._may_go_on(lease),
            on_step=self._on_step,
        )
        if not metrics:
            raise _Interrupted
        result = Evaluation(
            epoch=lease.number,
            version=pinned.meta.version,
            metrics=metrics,
            worker=self._name,
            seconds=time.monotonic() - started,
            at=time.time(),
        )
        fields = {key: value for key, value in asdict(result).items() if key != "epoch"}
        if self._leases.report_evaluation(lease, fields):
            self._say_result(result)
        self._held.drop(lease.piece)

    def _pinned(self, lease: Lease) -> tuple[Snapshot, torch.Tensor]:
        """The snapshot of an epoch's end; where it was lost, the present one takes its place."""
        name = epoch_pin(lease.number)
        while self._may_go_on(lease):
            try:
                return self._snapshots.fetch_pinned(name)
            except SnapshotMissing:
                self._snapshots.want_pin(name)
                self._pause(IDLE_SECONDS)
        raise _Interrupted

    def _say_result(self, result: Evaluation) -> None:
        shown = ", ".join(
            f"{name} {value:.4f}" for name, value in result.metrics.items() if name != "count"
        )
        self._jobs.event(
            self._job,
            "evaluated",
            f"epoch {result.epoch}: {shown}",
            epoch=result.epoch,
            version=result.version,
            metrics=result.metrics,
        )

    # -- what the other threads say and ask ----------------------------------------------------

    def _on_step(self) -> None:
        self._steps += 1
        self._progress_at = time.monotonic()

    def _alive(self) -> bool:
        return time.monotonic() - self._progress_at < self._settings.stall_seconds

    def _heard(self, renewal: Renewal) -> None:
        self._state = renewal.state
        if renewal.state == "gone" or State(renewal.state).over:
            self.leave(f"the job is {renewal.state}")
        elif renewal.state == State.PAUSED:
            self.leave("the job is paused")
        elif renewal.leave:
            self.leave(renewal.leave)

    def _noticed(self, notice: NoticeLike) -> None:
        log.info("notice: %s at %s", notice.kind, notice.at)
        self._notice = notice
        if notice.kind == "terminate":
            self.leave("notice of eviction")
        # the controller orders a replacement as soon as it hears of it
        self._heart.hurry()

    def _describe(self) -> dict[str, Any]:
        return {
            "at": time.time(),
            "instance": self._instance,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "doing": self._doing,
            "steps": self._steps,
            "samples": self._samples,
            "version": self._base_version[0] if self._base_version else None,
            "pushes": self._outbox.sent,
            "pushed_bytes": self._outbox.sent_bytes,
            "pushed_again": self._outbox.sent_again,
            "discarded": self._outbox.discarded,
            "unapplied": self._outbox.unapplied,
            "resident_bytes": psutil.Process().memory_info().rss,
            "notice": None if self._notice is None else self._notice.kind,
            "notice_at": None if self._notice is None else self._notice.at,
            "leaving": self._why or None,
        }

    def _report_failure(self, error: VcasgdError) -> None:
        """Tells the controller, which decides what an error of the user's code means."""
        failure = Failure(
            worker=self._name,
            piece=self._current.piece if self._current else "prepare",
            message=str(error),
            traceback=error.traceback if isinstance(error, UserCodeError) else "",
            # what the data set or the model is does not change from one attempt to the next
            fatal=isinstance(error, SpecError),
        )
        log.error("%s\n%s", error, failure.traceback)
        try:
            patiently(
                lambda: self._jobs.report_failure(self._job, failure),
                self._settings.patience_seconds,
                give_up=self._leaving.is_set,
            )
            if self._current is not None:
                self._leases.release(self._current)
        except StoreUnavailable as unheard:
            log.warning("the ledger did not hear of it: %s", unheard)
        if self._current is not None:
            self._held.drop(self._current.piece)
            self._outbox.forget(self._current.number)
            self._current = None
        self._failures += 1
        # others get the first chance to do better with the same piece
        self._pause(min(FAILURE_SECONDS * 2 ** (self._failures - 1), LONGEST_FAILURE_SECONDS))


def main() -> int:
    """The process. Exit status 0 when it left in good order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--worker", required=True)
    options = parser.parse_args()
    configure_logging("worker")
    try:
        worker = Worker(load_settings(), options.job, options.worker)
        signal.signal(signal.SIGTERM, lambda _number, _frame: worker.leave("SIGTERM"))
        worker.run()
    except VcasgdError as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
