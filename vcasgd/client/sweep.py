"""Jobs of a sweep, and the rule that ends some of them early. Pure: no client, no clock."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vcasgd.errors import SpecError
from vcasgd.schemas.jobs import JobView
from vcasgd.spec.sections import DEFAULT_METRICS, Metric

#: Most jobs of a sweep; more are a typing error.
MAX_TRIALS = 1000
#: Other jobs that the median needs.
MIN_PEERS = 2
_RANGE = re.compile(r"(uniform|log|int)\(([^,()]+),([^,()]+)\)")

#: Changes of the job file in one job, such as ``("args.lr=0.1", "seed=2")``.
Trial = tuple[str, ...]


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
        return cls(field, tuple(part.strip() for part in _split(values)))

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
    """Return four digits as YAML reads a number: with a point, also in front of an exponent."""
    return f"{value:#.4g}"


def _split(values: str) -> list[str]:
    """Split at commas that are in no brackets."""
    return re.split(r",(?![^\[{]*[\]}])", values)


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


# -- early stopping --------------------------------------------------------------------------------


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
    values = []
    for each in sorted(job.evaluations, key=lambda one: one.version):
        value = each.metrics.get(ranked.name)
        if value is None or not math.isfinite(value):
            values.append(-math.inf)
        else:
            values.append(value if ranked.mode == "max" else -value)
    return list(itertools.accumulate(values, max))


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
