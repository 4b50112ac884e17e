"""Events about what a job's workers reported, which can't write to the job's history themselves."""

from __future__ import annotations

from itertools import islice

from vcasgd.spec.sections import metric_text
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import Evaluation, JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.placement import Clearances
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.store.ledger.workers import WorkerBeats

#: Events in one step, and refusals of a job, so that a hostile worker can't flood the history.
MAX_CONCURRENT, MAX_REFUSALS = 10, 1000
#: Seconds of a push below which no link is called slow, however short the training is.
MIN_SECONDS = 10.0
#: Most events of a job: names of workers are many in a long one.
MAX_EVENTS = 100


class Announcements:
    """Adds one event for each evaluation and each refused worker of a job.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, job: str, ledger: RedisClient) -> None:
        self._job = job
        self._jobs = Jobs(ledger)
        self._clearances = Clearances(ledger)
        self._evaluations: set[int] = set()
        self._refusals: set[tuple[str, str]] = set()

    def step(self, job: JobRecord) -> None:
        """Announce what is new."""
        new = (each for each in job.evaluations if each.number not in self._evaluations)
        for each in islice(new, MAX_CONCURRENT):
            self._announce_evaluation(each)
            self._evaluations.add(each.number)
        if job.spec.required_labels and len(self._refusals) < MAX_REFUSALS:
            refusals = self._clearances.refused(self._job).items() - self._refusals
            for worker, why in islice(sorted(refusals), MAX_CONCURRENT):
                text = f"{worker} gets no work: {why}"
                self._jobs.announce(self._job, text, "lease-refused", text, worker=worker, why=why)
                self._refusals.add((worker, why))

    def _announce_evaluation(self, result: Evaluation) -> None:
        metrics = ", ".join(
            metric_text(name, value) for name, value in result.metrics.items() if name != "count"
        )
        self._jobs.announce(
            self._job,
            f"evaluation {result.number}",
            "evaluated",
            f"{result.place}: {metrics}",
            epoch=result.epoch,
            samples=result.samples,
            step=result.step,
            version=result.version,
            metrics=result.metrics,
        )


class WorkerEvents:
    """Names optimizers that aren't corrected, and links that are too slow for the updates.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, job: str, jobs: Jobs, beats: WorkerBeats) -> None:
        self._job = job
        self._jobs = jobs
        self._beats = beats
        #: Pushes of a worker when one of them was slow; an outage delays only one.
        self._slow: dict[str, int] = {}
        self._named: set[str] = set()
        self._uncorrected = False
        #: Indices of samples that were named.
        self._bad: set[str] = set()
        self._ranks = 1

    def step(self) -> None:
        """Judge the links of the workers that have pushed, and name what they report."""
        for worker, beat in self._beats.of(self._job).items():
            self._name_bad_samples(worker, beat.bad_samples or {})
            if beat.uncorrected and not self._uncorrected:
                self._name_optimizer(beat.uncorrected)
            if (ranks := beat.ranks or 1) > self._ranks:
                self._ranks = ranks
                self._jobs.announce(
                    *(self._job, f"{ranks} ranks", "several-ranks"),
                    f"{worker} trains every batch with {ranks} processes",
                    worker=worker,
                    ranks=ranks,
                )
            if worker not in self._named and len(self._named) < MAX_EVENTS:
                self._judge(worker, beat)

    def _name_optimizer(self, name: str) -> None:
        self._uncorrected = True
        self._jobs.note(
            self._job,
            "optimizer-uncorrected",
            f"{name} has moments of a worker's part of the batch, not of the whole "
            "batch, so several workers may train otherwise than one; those of SGD, Adam, and AdamW "
            "of torch.optim are corrected, and with any other optimizer, workers exchange "
            "gradients if the model has at most a million parameters, rounds have one step, and "
            "the loop steps all optimizers for each batch and changes no parameters itself; with "
            "min_local_batch of the batch's size, one worker trains",
            optimizer=name,
        )

    def _name_bad_samples(self, worker: str, found: dict[str, str]) -> None:
        for index in found.keys() - self._bad:
            if len(self._bad) == MAX_EVENTS:
                return
            self._bad.add(index)
            self._jobs.announce(
                self._job,
                f"bad sample {index}",
                "bad-sample",
                f"sample {index} is skipped by {worker}: {found[index]}",
                worker=worker,
                sample=index,
                why=found[index],
            )

    def _judge(self, worker: str, beat: Heartbeat) -> None:
        sends = beat.push_seconds or 0.0
        trains = (beat.local_steps or 0) * (beat.step_seconds or 0.0)
        pushes = beat.pushes or 0
        if not trains or not pushes or sends <= max(trains, MIN_SECONDS):
            return
        if self._slow.setdefault(worker, pushes) == pushes:
            return
        self._named.add(worker)
        size = (beat.pushed_bytes or 0) / pushes
        self._jobs.announce(
            self._job,
            f"slow link of {worker}",
            "slow-link",
            f"{worker} needs {sends:.0f} s to push an update of {size / 1e6:.3g} MB, and "
            f"{trains:.3g} s to train for it; choose a smaller update.codec, or a longer "
            "push_every",
            worker=worker,
            update_bytes=size,
            seconds=sends,
        )
