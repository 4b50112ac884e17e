"""Events about what a job's workers reported, which can't write to the job's history themselves."""

from __future__ import annotations

from itertools import islice

from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.clearance import Clearances
from vcasgd.store.ledger.job import Evaluation, JobRecord
from vcasgd.store.ledger.jobs import Jobs

#: Events in one step, and refusals of a job, so that a hostile worker can't flood the history.
MAX_CONCURRENT, MAX_REFUSALS = 10, 1000


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
            f"{name} {value:.4f}" for name, value in result.metrics.items() if name != "count"
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
