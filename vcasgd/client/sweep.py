"""Sweeps: jobs that differ in some fields, the rule that ends some early, and their comparison."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from vcasgd.client.client import PACKAGE_LIMIT_MB, Client
from vcasgd.client.following import PATIENCE_SECONDS, retried
from vcasgd.client.job import Job
from vcasgd.client.tracking.base import parameters
from vcasgd.errors import Conflict, NotFound, SpecError
from vcasgd.schemas.jobs import JobView
from vcasgd.spec.job import MAX_NAME, MEMBER, JobSpec
from vcasgd.spec.sections import DEFAULT_METRICS, Metric

#: Seconds between two looks at the jobs.
POLL_SECONDS = 2.0
#: Seconds between two looks at their costs: two bookings, so one that stays the same is final.
COST_SECONDS = 20.0
#: Most jobs of a sweep; more are a typing error.
MAX_TRIALS = 1000
#: Other jobs that the median needs.
MIN_PEERS = 2
_RANGE = re.compile(r"(uniform|log|int)\(([^,()]+),([^,()]+)\)")

#: Changes of the job file in one job, such as ``("args.lr=0.1", "seed=2")``.
Trial = tuple[str, ...]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Axis:
    """A field that a sweep varies: over values, or within a range."""

    field: str
    values: tuple[str, ...] = ()
    #: ``uniform``, ``log``, or ``int``, with the limits.
    distribution: str | None = None
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Parse ``args.lr=0.1,0.01`` or ``args.lr=log(0.0001,1)``. Raises :class:`SpecError`."""
        field, equals, values = (part.strip() for part in text.partition("="))
        if not (field and equals and values):
            raise SpecError(
                f"--over {text}: must have the form field=value,value,…",
                remedy="for example --over args.lr=0.1,0.01 or --over args.lr=log(0.0001,1)",
                field="over",
            )
        if found := _RANGE.fullmatch(values):
            return cls._range(text, field, *found.groups())
        # At commas that are in no brackets.
        parts = re.split(r",(?![^\[{]*[\]}])", values)
        return cls(field, tuple(part.strip() for part in parts))

    @classmethod
    def _range(cls, text: str, field: str, distribution: str, low: str, high: str) -> Axis:
        try:
            limits = float(low), float(high)
        except ValueError:
            limits = math.nan, math.nan
        least = 0.0 if distribution == "log" else -math.inf
        if not least < limits[0] < limits[1] < math.inf:
            raise SpecError(
                f"--over {text}: limits must be two numbers, in ascending order"
                f"{', above 0' if distribution == 'log' else ''}",
                field="over",
            )
        if distribution == "int" and math.ceil(limits[0]) > math.floor(limits[1]):
            raise SpecError(f"--over {text}: there is no whole number between", field="over")
        return cls(field, (), distribution, *limits)

    def sample(self, generator: random.Random) -> str:
        """Return the change to one value, drawn at random."""
        if self.distribution is None:
            value = generator.choice(self.values)
        elif self.distribution == "int":
            value = str(generator.randint(math.ceil(self.low), math.floor(self.high)))
        elif self.distribution == "log":
            drawn = generator.uniform(math.log(self.low), math.log(self.high))
            value = _number(math.exp(drawn))
        else:
            value = _number(generator.uniform(self.low, self.high))
        return f"{self.field}={value}"


def _number(value: float) -> str:
    """Return four digits as YAML reads a number that isn't whole."""
    return f"{value:#.4g}"


def grid(axes: Sequence[Axis]) -> list[Trial]:
    """Return all combinations of the values. Raises :class:`SpecError`."""
    for axis in axes:
        if axis.distribution:
            raise SpecError(
                f"--over {axis.field}: a range has no combinations",
                remedy="list values, or draw them with --random N",
                field="over",
            )
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_TRIALS:
        raise SpecError(
            f"--over: {count} combinations are too many; a sweep has at most {MAX_TRIALS} jobs",
            remedy="draw some of them with --random N",
            field="over",
        )
    columns = ([f"{axis.field}={value}" for value in axis.values] for axis in axes)
    return list(itertools.product(*columns))


def sample(axes: Sequence[Axis], count: int, seed: int) -> list[Trial]:
    """Return up to ``count`` different combinations, drawn at random."""
    generator = random.Random(seed)
    drawn = (tuple(axis.sample(generator) for axis in axes) for _ in range(20 * count))
    return list(itertools.islice(dict.fromkeys(drawn), count))


def member_name(name: str, trial: Trial) -> str:
    """Return the name of a job of a sweep, such as ``digits--lr-0-1``; a long one is cut."""
    changes = [change.partition("=") for change in trial]
    if any(field == "name" for field, _, _ in changes):
        return name
    words = [f"{field.rpartition('.')[2]}-{value}".lower() for field, _, value in changes]
    text = re.sub("[^a-z0-9]+", "-", "-".join(words)).strip("-")
    whole = f"{name}{MEMBER}{text}"
    if len(whole) <= MAX_NAME:
        return whole
    mark = hashlib.sha256(whole.encode()).hexdigest()[:4]
    return f"{whole[: MAX_NAME - 5].rstrip('-')}-{mark}"


# -- early stopping -----------------------------------------------------------------------------


def metric_of(job: JobView, metric: Metric | None = None) -> Metric:
    """Return the metric that ranks a job's models, unless ``metric`` is another one."""
    found = metric or job.spec.stop.chosen_metric
    if found is not None:
        return found
    reported = {name for evaluation in job.evaluations for name in evaluation.metrics}
    return next((each for each in DEFAULT_METRICS if each.name in reported), DEFAULT_METRICS[0])


def best_qualities(job: JobView, metric: Metric | None = None) -> list[float]:
    """Return the best value up to each evaluation of a job; higher is better."""
    ranked = metric_of(job, metric)
    evaluations = sorted(job.evaluations, key=lambda each: each.version)
    qualities = (ranked.quality(each.metrics) for each in evaluations)
    return list(itertools.accumulate((-math.inf if q is None else q for q in qualities), max))


def below_median(qualities: Mapping[str, Sequence[float]], after: int) -> list[str]:
    """Return the jobs whose best value is worse than the median of the others' at that time.

    ``qualities``: :func:`best_qualities` of each job. A job with k evaluations, at least ``after``,
    is compared with the best values of the others after k evaluations. This is the median stopping
    rule (Golovin et al.: "Google Vizier", 2017, section 3.2.2).
    """
    worse = []
    for job, own in qualities.items():
        count = len(own)
        peers = [other[count - 1] for name, other in qualities.items()
                 if name != job and len(other) >= count > 0]  # fmt: skip
        if count >= max(1, after) and len(peers) >= MIN_PEERS and own[-1] < median(peers):
            worse.append(job)
    return worse


# -- running a sweep ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepOptions:
    """Limits of a sweep. ``early_stop``: evaluations before the median rule applies; None: never.

    ``max_cost_usd`` is the budget of all its jobs together.
    """

    name: str
    at_once: int = 4
    early_stop: int | None = None
    max_cost_usd: float | None = None
    metric: Metric | None = None
    limit_mb: float = PACKAGE_LIMIT_MB


class Sweep:
    """A sweep. Running it again with the same name and jobs continues it.

    Each job is submitted under an idempotency key of the sweep's name and the job's changes, so no
    job is submitted twice within a week. ``report`` is called with a line for people.
    """

    def __init__(
        self,
        client: Client,
        trials: Mapping[Trial, JobSpec],
        options: SweepOptions,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._options = options
        self._report = report
        self._waiting = dict(trials)
        #: Jobs by ID, in the order of their submission.
        self._jobs: dict[str, Job] = {}
        self._changes: dict[str, Trial] = {}
        #: USD that each job has cost, as last asked, and when to ask again.
        self._spent: dict[str, float] = {}
        self._final: set[str] = set()
        self._ask_at = 0.0

    def run(self) -> list[Job]:
        """Run all jobs to their ends, and return them.

        Raises the errors of :meth:`vcasgd.Client.submit_directory`.
        """
        while self._waiting or self._running():
            while self._waiting and len(self._running()) < self._options.at_once:
                self._submit_next()
            time.sleep(POLL_SECONDS)
            for job in self._running():
                self._refresh(job)
            self._stop_early()
            self._enforce_budget()
        return list(self._jobs.values())

    def _running(self) -> list[str]:
        return [name for name, job in self._jobs.items() if not job.over]

    def _submit_next(self) -> None:
        changes, spec = next(iter(self._waiting.items()))
        del self._waiting[changes]
        digest = hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:16]
        key = f"sweep/{self._options.name}/{digest}"
        spec = spec.model_copy(update={"name": member_name(spec.name, changes)})
        limit = self._options.limit_mb
        try:
            job = _patiently(lambda: self._client.submit_directory(spec, limit, key))
        except Conflict as error:
            raise Conflict(
                f"sweep {self._options.name} has run {' '.join(changes)} with another job file or "
                "other code",
                remedy="choose another --name for the sweep",
            ) from error
        self._jobs[job.id], self._changes[job.id] = job, changes
        how = f"{job.state.phrase} already" if job.over else "runs"
        self._report(f"{job.id} {how}: {' '.join(changes)}")

    def _refresh(self, name: str) -> None:
        try:
            job = self._jobs[name] = _patiently(lambda: self._client.job(name))
        except NotFound:
            del self._jobs[name]
            self._report(f"{name} was deleted")
            return
        if job.over:
            best = f", best {job.best}" if job.best else ""
            self._report(f"{name} {job.state}{best}")

    def _stop_early(self) -> None:
        after, running = self._options.early_stop, self._running()
        if after is None:
            return
        qualities = {
            name: best_qualities(job, self._options.metric) for name, job in self._jobs.items()
        }
        for name in below_median(qualities, after):
            if name in running:
                self._report(f"{name} is worse than the median of the others; it is canceled")
                self._cancel(name)

    def _enforce_budget(self) -> None:
        limit = self._options.max_cost_usd
        if limit is None or not (self._waiting or self._running()):
            return
        if time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + COST_SECONDS
        for name in self._jobs.keys() - self._final:
            job, before = self._jobs[name], self._spent.get(name)
            try:
                self._spent[name] = _patiently(job.cost).spent_usd
            except NotFound:
                self._final.add(name)  # It was deleted, and what it cost still counts.
                continue
            if job.over and self._spent[name] == before:
                self._final.add(name)
        spent = sum(self._spent.values())
        if spent >= limit:
            self._report(f"the budget is used up ({spent:.2f} USD); the sweep ends")
            self._waiting.clear()
            for name in self._running():
                self._cancel(name)

    def _cancel(self, name: str) -> None:
        try:
            self._jobs[name] = _patiently(self._jobs[name].cancel)
        except (Conflict, NotFound):
            self._refresh(name)  # It has just ended, or was deleted.


def _patiently(request: Callable[[], _Result]) -> _Result:
    """Return the result of a request, which may be sent again: the API can restart meanwhile."""
    return retried(request, PATIENCE_SECONDS)


# -- comparison ---------------------------------------------------------------------------------


def compare(jobs: Sequence[Job], metric: Metric | None = None) -> list[dict[str, Any]]:
    """Return a row for each job, the best one first.

    ``best`` is its best value of ``metric``, by default of the metric that ranks its models.
    ``differences`` are the fields of the job files that not all of them share.
    """
    fields = [parameters(job) for job in jobs]
    names = sorted({name for row in fields for name in row} - {"name"})
    different = [name for name in names if len({repr(row.get(name)) for row in fields}) > 1]
    rows: list[tuple[float, dict[str, Any]]] = []
    for job, own in zip(jobs, fields, strict=True):
        ranked, qualities = metric_of(job, metric), best_qualities(job, metric)
        quality = qualities[-1] if qualities else -math.inf
        took = job.ended_at - job.started_at if job.ended_at and job.started_at else None
        row = {
            "job": job.id,
            "state": job.state.value,
            "metric": ranked.name,
            "best": _value(ranked, quality),
            "evaluations": len(qualities),
            "samples": job.progress.samples_applied,
            "seconds": took,
            "spent_usd": job.cost().spent_usd,
            "differences": {name: own.get(name) for name in different},
        }
        rows.append((quality, row))
    rows.sort(key=lambda pair: -pair[0])
    return [row for _, row in rows]


def _value(metric: Metric, quality: float) -> float | None:
    """Return the metric's value of a quality; None if it has never been finite."""
    if not math.isfinite(quality):
        return None
    return quality if metric.mode == "max" else -quality
