"""The life of one job: it starts, runs, and ends.

Each step reads the ledger and the tensors servers and does the next thing. Nothing that the next
controller needs is kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from vcasgd.controller.jobs.announcements import Announcements
from vcasgd.controller.jobs.checkpointing import CheckpointWriter
from vcasgd.controller.jobs.failures import (
    REMEDY,
    at_fault,
    checkpoint_before,
    diverged,
    hopeless,
    models_before,
    none_agree,
    recent,
    repeated,
    still_counting,
    suspect_to_undo,
    too_many_bad,
)
from vcasgd.errors import Cause, SnapshotMissing, SpecError
from vcasgd.learning.batch_weights import CountedLabels
from vcasgd.learning.divergence import learning_rate_factor
from vcasgd.learning.layout import Layout
from vcasgd.spec.sections import metric_text
from vcasgd.steady_time import steady_time
from vcasgd.storage.checkpoints import StoredCheckpoint
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import Evaluation, Failure, JobRecord, JobState, ModelFacts
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Evaluations
from vcasgd.store.ledger.tuning import Tunings
from vcasgd.store.tensors.snapshot_index import delete_job


class JobLifecycle:
    """Takes one job from its submission to its end, one :meth:`step` at a time.

    Steps raise :class:`~vcasgd.errors.StoreUnavailable` while a server is unavailable and can be
    repeated.
    """

    def __init__(
        self,
        job: str,
        *,
        ledger: RedisClient,
        nodes: Sequence[RedisClient],
        storage: Storage,
        writer: ThreadPoolExecutor,
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self._job = job
        self._ledger = ledger
        self._jobs = Jobs(ledger)
        self._nodes = nodes
        self._clock = clock
        self._evaluations = Evaluations(ledger, job)
        self._announcements = Announcements(job, ledger)
        self._checkpoints = CheckpointWriter(
            job,
            jobs=self._jobs,
            evaluations=self._evaluations,
            nodes=nodes,
            storage=storage,
            executor=writer,
            clock=clock,
        )
        #: True once an ended job's tensors are deleted.
        self._deleted = False
        #: Id of the request that submitted the job; set by the first step.
        self.request: str | None = None
        #: True if the job's workers need secrets; set by the first step.
        self.has_secrets = False

    def step(self) -> str | None:
        """Do what is next for the job in its present state.

        If its workers wrote something that can't be read, do nothing and return why.
        """
        job = self._jobs.get(self._job)
        self.request, self.has_secrets = job.request, bool(job.spec.secrets)
        if job.invalid is not None and not job.state.over:
            return job.invalid
        self._announcements.step(job)
        self._checkpoints.collect()
        match job.state:
            case JobState.STARTING:
                self._start(job)
            case JobState.RUNNING:
                self._run(job)
            case JobState.FINISHING:
                self._finish(job)
            case JobState.PAUSED | JobState.SUCCEEDED | JobState.FAILED | JobState.CANCELLED:
                pass
        return None

    def checkpoint_now(self, seconds: float) -> None:
        """Write a checkpoint of the present snapshot within ``seconds``, if the job has one."""
        job = self._jobs.get(self._job)
        with_model = (JobState.RUNNING, JobState.PAUSED, JobState.FINISHING)
        if job.facts is not None and job.state in with_model:
            self._checkpoints.write_now(job, seconds)

    def clean_up(self) -> bool:
        """Delete an ended job's data from the tensors servers. Return True when it is deleted."""
        if not self._checkpoints.idle:
            self._checkpoints.collect()
            return False
        if not self._deleted:
            delete_job(self._nodes, self._job)
            self._deleted = True
        return True

    def _start(self, job: JobRecord) -> None:
        if job.facts is not None:
            try:
                points = job.facts.points(job.spec)
            except SpecError as error:
                # A worker of this version reports no such facts.
                self._fail(job, f"{error.message}; a worker reported this", None)
                return
            self._jobs.set_plan(job.id, points, job.facts.most_workers(job.spec))
            beside = Layout.from_json(job.facts.layout).beside
            if beside and job.spec.workers.max > 1:
                text = (
                    f"{', '.join(beside)} beside the model: each version has the mean of the "
                    "workers' values, who reach a step at different times, and code after the last "
                    "epoch doesn't run; ema in the job file is cheaper for an average"
                )
                self._jobs.note(job.id, "state-beside", text)
            if why := job.idle:
                self._jobs.note(job.id, "batch-undivided", why)
            self._name_choices(job, job.facts)
            if name := Layout.from_json(job.facts.layout).rounded:
                self._jobs.note(
                    job.id,
                    "float64-rounded",
                    f"{name} is float64: workers compute in float64, and snapshots, checkpoints, "
                    "and downloads have the model as float32, with seven digits; models of at "
                    "most 65,536 numbers in float64 keep them on one store node, with the rule "
                    "rounds and the encoding float32",
                )
            for kind, text in job.facts.notes.items():
                self._jobs.note(job.id, kind, text)
            if (labels := job.facts.batch_labels) and job.spec.workers.max > 1:
                self._note_labels(job, labels)
            samples, batch_size = job.facts.samples, job.facts.batch_size or 1
            if batch_size > samples:
                why = (
                    f"batch_size is {batch_size}, but the training set has {samples} samples, so "
                    "an epoch is a single step; a smaller batch_size makes more steps"
                )
                self._jobs.note(job.id, "batch-exceeds-data", why)
            self._jobs.transition(
                job.id,
                JobState.RUNNING,
                [JobState.STARTING],
                why="the first snapshot exists; training starts",
                started_at=self._clock(),
            )
        else:
            self._fail_if_hopeless(job, self._failures(job))

    def _name_choices(self, job: JobRecord, facts: ModelFacts) -> None:
        """Say what the first worker has chosen where the job leaves it open."""
        if facts.gpus_why:
            self._jobs.announce(job.id, "gpus", "gpus-chosen", facts.gpus_why, gpus=facts.gpus)
        if facts.codec != "float32" and job.spec.update.codec == "auto":
            text = (
                f"updates and models travel as {facts.codec}, because the first worker's link to "
                "the store is slow; set update.codec to choose"
            )
            self._jobs.note(job.id, "codec-chosen", text)

    def _note_labels(self, job: JobRecord, labels: str) -> None:
        """Say how parts of batches count. ``labels`` is JSON that a worker wrote."""
        try:
            counted = CountedLabels.from_json(labels)
        except SpecError as error:
            self._fail(job, error.message, None)
            return
        text = (
            f"parts of a batch count by the {counted}, because the loss is "
            "a mean over them; define batch_weight to choose"
        )
        self._jobs.note(job.id, "batch-weights", text)

    def _run(self, job: JobRecord) -> None:
        reports = self._failures(job)
        failures = [each for each in reports if not each.ended]
        if self._fail_if_hopeless(job, failures):
            return
        if (why := too_many_bad(job)) is not None:
            self._fail(job, why, None)
            return
        how = diverged(job, failures, self._jobs.workers.count(job.id))
        if how is not None:
            self._go_back(job, how)
            return
        if self._undo_suspect(job):
            return
        if job.totals.get("restorations", 0) < job.tuned.restorations:
            # The shards have not gone back yet; what is evaluated is what they go back from.
            return
        for evaluation, why in chain(self._endings(job), self._loop_endings(job, reports)):
            if self._checkpoints.has_model(job, evaluation):
                self._jobs.transition(
                    job.id,
                    JobState.FINISHING,
                    [JobState.RUNNING],
                    why=why,
                    final_evaluation=evaluation.number,
                )
                return
        self._evaluate_if_due(job)
        self._checkpoints.write_due(job)

    def _evaluate_if_due(self, job: JobRecord) -> None:
        """Open an evaluation of the present model if the job evaluates by time and it is due."""
        interval, samples = job.spec.evaluate.interval, int(job.totals.get("applied", 0))
        before = self._evaluations.opened_at() or job.started_at
        if interval.unit != "second" or before is None or self._clock() - before < interval.count:
            return
        pending, done = self._evaluations.read()
        # Without new samples there is nothing to measure; and evaluations don't queue up.
        if samples and samples not in done and not pending:
            self._evaluations.open(samples, self._clock())

    def _endings(self, job: JobRecord) -> Iterator[tuple[Evaluation, str]]:
        """Yield the evaluations whose models can end the job now, each with the reason."""
        if not job.evaluations:
            return
        newest, metric = job.evaluations[-1], job.spec.stop.chosen_metric
        last = newest
        if newest.rollbacks < job.tuned.rollbacks:
            # Training went back to an earlier model since then.
            last = next(iter(models_before(job)), newest)
        for each in reversed(job.evaluations):
            if metric is not None and metric.reached_by(each.metrics):
                value = metric_text(metric.name, each.metrics[metric.name])
                yield each, f"{value} reached {metric.target:g} in {each.place}"
        if job.best is not None and (why := _patience_ended(job)):
            # The newest one replaces a best model that was lost.
            yield from ((job.best, why), (newest, why))
        complete = job.epochs is not None and job.finished_epochs >= job.epochs
        if complete and job.points is not None and newest.number == job.points.last:
            after = "" if last is newest else f"; training diverged after {last.place}"
            yield last, f"{_done(job.spec.length)}{after}"
        limit = job.spec.stop.max_duration
        if limit and job.started_at and self._clock() - job.started_at > limit.total_seconds():
            yield last, f"max_duration has passed; the last evaluation is of {last.place}"

    def _loop_endings(
        self, job: JobRecord, reports: Sequence[Failure]
    ) -> Iterator[tuple[Evaluation, str]]:
        """Yield the evaluations that can end a job whose loop decided to end, as
        :meth:`_endings`.

        What was trained before the decision counts, so the model of that time is evaluated first.
        """
        ended = next((each for each in reports if each.ended), None)
        samples = int(job.totals.get("applied", 0))
        pending, done = self._evaluations.read()
        if ended is None or pending or not samples:
            return
        is_known = any(each.version >= ended.version for each in job.evaluations)
        if not is_known and samples not in done:
            self._evaluations.open(samples, self._clock())
            return
        yield from ((each, ended.message) for each in (job.best, *job.evaluations[-1:]) if each)

    def _finish(self, job: JobRecord) -> None:
        """End the job once the model of its final evaluation is in the storage."""
        if suspect_to_undo(job) is not None:
            self._return_to_running(job, "its model may have wrong work of a volunteer")
            return
        final = (each for each in job.evaluations if each.number == job.final_evaluation)
        evaluation = next(final, None)
        lost = f"the model of evaluation {job.final_evaluation} was lost before it was stored"
        if evaluation is None:
            self._return_to_running(job, lost)
            return
        try:
            stored = self._checkpoints.store(job, evaluation)
        except SnapshotMissing:
            self._return_to_running(job, lost)
            return
        if stored is not None:
            self._jobs.transition(
                job.id,
                JobState.SUCCEEDED,
                [JobState.FINISHING],
                why=job.reason or "done",
                model=stored.name,
            )

    def _return_to_running(self, job: JobRecord, why: str) -> None:
        self._jobs.transition(job.id, JobState.RUNNING, [JobState.FINISHING], why=why)

    # -- failures and divergence -------------------------------------------------------------------

    def _failures(self, job: JobRecord) -> list[Failure]:
        """Return the failures that have not expired."""
        failures = self._jobs.failures(job.id)
        return recent(failures, self._jobs.now()) if failures else []

    def _fail_if_hopeless(self, job: JobRecord, failures: list[Failure]) -> bool:
        counting = [
            each
            for each in still_counting(failures, job.version)
            if not each.diverged and each.fault is not Cause.MACHINE
        ]
        failure = next((each for each in counting if each.fault is Cause.JOB), None)
        failure = failure or repeated(counting, self._jobs.workers.count(job.id))
        if failure is not None:
            self._fail(job, failure.message, failure.traceback)
            return True
        blamed = at_fault(failures, prepared=job.facts is not None)
        why = self._quarantine(job, blamed) if blamed else None
        if why is not None:
            self._fail(job, why, None)
        return why is not None

    def _quarantine(self, job: JobRecord, blamed: dict[str, Failure]) -> str | None:
        """Give workers no more work whose machines are to blame.

        Returns why the job fails, if too few others are left.
        """
        workers = self._jobs.workers.names(job.id)
        # Workers write the failures, so they may name anything.
        for worker in workers.intersection(blamed) - self._jobs.workers.quarantined(job.id).keys():
            why = blamed[worker].message
            if self._jobs.workers.quarantine(job.id, worker, why):
                text = f"{worker} gets no more work: {why}"
                self._jobs.event(job.id, "worker-quarantined", text, worker=worker)
        return none_agree(blamed, workers, job.evictions + job.kills, self._jobs.now())

    def _go_back(self, job: JobRecord, how: str) -> None:
        """Go back to the best model with a lower learning rate, or fail the job.

        Repeated until the model is in the storage. The parameter servers do the rest.
        """
        models = models_before(job)
        why = hopeless(job, how, models)
        if why is not None:
            self._fail(job, why, None)
            return
        for model in models:
            try:
                stored = self._checkpoints.store(job, model)
            except SnapshotMissing:
                continue
            if stored is not None:
                self._record_rollback(job, how, model, stored)
            return
        self._fail(job, f"{how}; training diverged, and no earlier model is left; {REMEDY}", None)

    def _record_rollback(
        self, job: JobRecord, how: str, model: Evaluation, stored: StoredCheckpoint
    ) -> None:
        number = job.tuned.rollbacks + 1
        self._jobs.roll_back(
            job.id,
            number,
            stored.name,
            f"training diverged: {how}; it went back to the model of {model.place}, and the "
            "learning rate is halved",
            rollbacks=number,
            epoch=model.epoch,
            version=model.version,
            learning_rate=learning_rate_factor(job.tuned.divergences + 1),
        )

    def _undo_suspect(self, job: JobRecord) -> bool:
        """Go back to the model before the work of an owner that may be wrong; True if it did so."""
        due = suspect_to_undo(job)
        if due is None:
            return False
        owner, suspect = due
        undone = [*job.tuned.undone, owner]
        name = checkpoint_before(suspect, self._jobs.checkpoints(job.id))
        if name is None:
            Tunings(self._ledger, job.id).publish(undone=undone)
            text = f"no checkpoint is left to undo the work of owner {owner}"
            self._jobs.event(job.id, "not-rolled-back", text, owner=owner)
            return False
        return self._jobs.roll_back(
            job.id,
            job.tuned.rollbacks + 1,
            name,
            f"the last work of owner {owner} is undone, because {suspect.why}; training went back "
            f"to checkpoint {name}, and the samples since then are trained again",
            restorations=job.tuned.restorations + 1,
            undone=undone,
            owner=owner,
            name=name,
        )

    def _fail(self, job: JobRecord, why: str, traceback: str | None) -> None:
        allowed = [JobState.STARTING, JobState.RUNNING]
        self._jobs.transition(job.id, JobState.FAILED, allowed, why=why, traceback=traceback)


def _patience_ended(job: JobRecord) -> str | None:
    """Return why the job ends if its metric has not improved for long enough, else None."""
    best, metric, count = job.best, job.metric, job.without_improvement
    if job.spec.stop.patience is None or count < job.spec.stop.patience:
        return None
    assert best is not None, "evaluated"
    assert metric is not None, "measured"
    value = f"{metric_text(metric.name, best.metrics[metric.name])} in {best.place}"
    return f"{value} was not improved by {count} evaluations in a row"


def _done(length: str) -> str:
    return f"{length} is done" if length.startswith("1 ") else f"all {length} are done"
