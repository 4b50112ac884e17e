"""Screening of volunteers' updates: does an owner's work look like that of the others?

No single update is evidence: honest ones differ in length and direction by far more than an attack
needs, and late in training they agree with nobody. Over some tens of updates, four numbers do show
the common attacks, each compared with the same number of the other owners:

- *length*, the mean logarithm of an update's norm, and of its norm per sample: scaled updates are
  longer by both;
- *agreement*, the mean cosine with the others' last updates, and *outwardness*, that with the
  model's distance from where it has lately been. If an owner pushes the model to where the loss is
  higher, the others push it back: it disagrees, and moves outward, or the
  others agree with each other. An honest machine can disagree, because its batches are larger, but
  only while nobody agrees, and then it moves inward;
- *familiarity*, the part of an update within the span of the others' last updates: noise has none;
- *repetition*, the part of updates that equal an earlier one of the same owner: replayed ones.

Vectors are compared by random sketches (Charikar 2002), which keep inner products up to about
1/√:data:`SKETCH`. Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from operator import itemgetter
from statistics import fmean, median, stdev

import torch
from torch import Tensor

#: Elements of a sketch.
SKETCH = 2048
#: Updates of an owner that are judged together, and by how many of them judgements are apart.
WINDOW, STEP = 64, 8
#: Last updates of an owner that may be wrong once its window looks wrong.
SUSPECT = 2 * WINDOW
#: Last updates of the other owners that one is compared with, and how many are needed.
RECENT, MIN_RECENT = 32, 12
#: Times the others' median length from which a single update is refused.
FAR_TOO_LONG = 50.0
#: The same for the mean of so many updates. After a hard batch, momentum makes tens of them long,
#: and honest owners on blobs reached 2.8 and 2.1 times (docs/adr/0023).
TOO_LONG = {WINDOW: 4.0, SUSPECT: 3.0}
#: Mean cosine with the others that is below anything that honest work shows, standard errors by
#: which the mean has to be below, and the factor by which it is more negative than the others'.
OPPOSED, ERRORS, MORE_OPPOSED = -0.15, 4.0, 1.5
#: Mean cosine of each of the others from which they agree with each other.
AGREED = 0.1
#: Updates over which the model's mean is taken.
MEAN_WINDOW = 128
#: Part of the others' least familiarity, below which an owner's is noise.
UNFAMILIAR = 0.25
#: Relative difference up to which two updates are equal, and the part of repeated updates that is
#: too large.
EQUAL, TOO_MANY_EQUAL = 1e-3, 0.5
#: Part of each row's length that doesn't count as its direction.
RIDGE = 1e-3
#: Updates in a mean of which standard errors are computed; consecutive ones aren't independent.
BLOCK = 4
#: Owner of all machines of the cluster. They are compared with, and never accused.
OWN = ""


@dataclass(frozen=True)
class Measure:
    """An update as it is screened: the norm and the sketch of its change of the parameters, and the
    sketch of the model that it is applied to.

    ``lengths`` are the logarithms of the norms of its changes of the parameters and of the running
    statistics, and of both norms per sample. A machine that trains longer intervals has a larger
    norm; one that trains shorter ones can have a larger norm per sample, because of its momentum.
    """

    norm: float
    lengths: tuple[float, ...]
    sketch: Tensor
    model: Tensor


@dataclass(frozen=True)
class _Row:
    """Numbers of one update; None where there were too few others to compare it with."""

    version: int
    lengths: tuple[float, ...]
    repeated: bool
    agreement: float | None
    familiarity: float | None
    outwardness: float


@dataclass
class _OwnerHistory:
    rows: deque[_Row] = field(default_factory=lambda: deque(maxlen=SUSPECT))
    #: The newest updates, each with its number among those of all owners.
    measures: deque[tuple[int, Measure]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    count: int = 0

    @property
    def window(self) -> list[_Row]:
        """The newest updates; empty before there are enough."""
        rows = [row for row in self.rows if row.agreement is not None][-WINDOW:]
        return rows if len(rows) == WINDOW else []


class Screening:
    """Screening of one shard, vectors of ``floats`` elements; workers don't know the ``seed``.

    Owners are names; :data:`OWN` are the machines of the cluster. An owner is compared with all
    others together. That needs two of them, or machines of the cluster.
    """

    def __init__(self, floats: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (floats,), generator=generator, dtype=torch.int8)
        self._signs.mul_(2).sub_(1)
        self.restart()

    def restart(self) -> None:
        """Forget all updates."""
        self._histories: dict[str, _OwnerHistory] = {}
        self._count = 0
        #: Mean of the models of the last updates.
        self._mean: Tensor | None = None

    def measure(self, step: Tensor, model: Tensor, parameters: int, samples: int) -> Measure:
        """Measure an update of so many samples.

        ``step`` is how it changes the ``model``, float32 [floats] each, of which the statistics
        follow the first ``parameters`` elements. It is changed.
        """
        drift = float(torch.linalg.vector_norm(step[parameters:]))
        step[parameters:] = 0.0
        norm, share = float(torch.linalg.vector_norm(step)), math.log(max(samples, 1))
        lengths = [math.log(max(length, 1e-30)) for length in (norm, drift)]
        lengths += [length - share for length in lengths]
        return Measure(norm, tuple(lengths), self.sketch(step), self.sketch(model))

    def sketch(self, vector: Tensor) -> Tensor:
        """Return the sketch, float32 [:data:`SKETCH`], of a float32 vector."""
        out = torch.zeros(SKETCH)
        whole = len(vector) // SKETCH * SKETCH
        signed = vector * self._signs
        if whole:
            out += signed[:whole].view(-1, SKETCH).sum(0)
        out[: len(vector) - whole] += signed[whole:]
        return out

    def refusal(self, owner: str, measure: Measure) -> str | None:
        """Return why a single update is refused, or None."""
        others = [other.lengths for other in self._last_of_others(owner)]
        if owner == OWN or len(others) < MIN_RECENT or not self._others(owner):
            return None
        factor = _excess(measure.lengths, [median(kind) for kind in zip(*others, strict=True)])
        far = factor > FAR_TOO_LONG
        return f"the update is {factor:.0f} times as long as those of others" if far else None

    def add(self, owner: str, measure: Measure, version: int) -> str | None:
        """Add an applied update, made on ``version``; return why its owner's last ones are wrong.

        Returns None if they look right, or can't be judged now.
        """
        history = self._histories.setdefault(owner, _OwnerHistory())
        others = [other.sketch for other in self._last_of_others(owner)]
        agreement, familiarity = _compared(measure.sketch, others)
        repeated = _repeats(measure, (earlier for _, earlier in history.measures))
        self._mean = measure.model.clone() if self._mean is None else self._mean
        self._mean.lerp_(measure.model, 1 / MEAN_WINDOW)
        outward = _cosine(measure.sketch, measure.model - self._mean)
        history.rows.append(
            _Row(version, measure.lengths, repeated, agreement, familiarity, outward)
        )
        history.measures.append((self._count, measure))
        history.count += 1
        self._count += 1
        if owner == OWN or history.count % STEP:
            return None
        judged_by, window = self._others(owner), history.window
        if not judged_by or not window:
            return None
        windows = [other.window for other in judged_by]
        return (
            _too_long(history, judged_by)
            or _opposed(window, windows)
            or _unfamiliar(window, windows)
            or _repeating(window, windows)
        )

    def version_before(self, owner: str) -> int | None:
        """Return the version before the last updates of an owner, of which any may be wrong.

        Returns None if it has none.
        """
        history = self._histories.get(owner)
        return None if history is None else history.rows[0].version

    def _last_of_others(self, owner: str) -> list[Measure]:
        """Return the last updates of all others, however many the owner made meanwhile."""
        others = [reversed(h.measures) for name, h in self._histories.items() if name != owner]
        newest_first = merge(*others, key=itemgetter(0), reverse=True)
        return [measure for _, measure in islice(newest_first, RECENT)]

    def _others(self, owner: str) -> list[_OwnerHistory]:
        """Return the histories that an owner is compared with; empty while they are too few."""
        others = {n: each for n, each in self._histories.items() if n != owner and each.window}
        return list(others.values()) if OWN in others or len(others) > 1 else []


def _too_long(history: _OwnerHistory, others: Sequence[_OwnerHistory]) -> str | None:
    for number, limit in TOO_LONG.items():
        if len(history.rows) < number:
            continue
        means = [_mean_lengths(other, number) for other in others]
        longest = [max(kind) for kind in zip(*means, strict=True)]
        factor = _excess(_mean_lengths(history, number), longest)
        if factor > limit:
            return f"its updates are {factor:.1f} times as long as those of any other owner"
    return None


def _mean_lengths(history: _OwnerHistory, number: int) -> list[float]:
    """Return the means of at most so many of the newest updates."""
    lengths = [row.lengths for row in list(history.rows)[-number:]]
    return [fmean(kind) for kind in zip(*lengths, strict=True)]


def _excess(lengths: Sequence[float], usual: Sequence[float]) -> float:
    """Return the factor by which a norm, and that norm per sample, exceed the usual ones."""
    excess = [one - other for one, other in zip(lengths, usual, strict=True)]
    kinds = len(excess) // 2
    return math.exp(max(map(min, excess[:kinds], excess[kinds:])))


def _opposed(window: list[_Row], others: Sequence[list[_Row]]) -> str | None:
    blocks = [_mean(window[at : at + BLOCK], "agreement") for at in range(0, WINDOW, BLOCK)]
    mean, error = fmean(blocks), stdev(blocks) / math.sqrt(len(blocks))
    # The others push back against a hostile owner, so that they oppose it, too, but less.
    least = min(_mean(other, "agreement") for other in others)
    if mean + ERRORS * error >= OPPOSED or mean >= MORE_OPPOSED * min(least, 0.0):
        return None
    outwardness = [_mean(other, "outwardness") for other in others]
    outward = _mean(window, "outwardness") > max(0.0, *outwardness)
    if outward or least > AGREED:
        return f"its updates oppose those of the others, with a mean cosine of {mean:.2f}"
    return None


def _mean(window: Iterable[_Row], name: str) -> float:
    return fmean(getattr(row, name) for row in window)


def _unfamiliar(window: list[_Row], others: Iterable[list[_Row]]) -> str | None:
    least = min(_mean(other, "familiarity") for other in others)
    own = _mean(window, "familiarity")
    if own < UNFAMILIAR * least:
        return f"its updates have {own / least:.0%} of what those of the others have in common"
    return None


def _repeating(window: list[_Row], others: Iterable[list[_Row]]) -> str | None:
    own = _mean(window, "repeated")
    largest = max(_mean(other, "repeated") for other in others)
    if own > TOO_MANY_EQUAL > 2 * largest:
        return f"{own:.0%} of its updates are equal to earlier ones of its own"
    return None


def _compared(sketch: Tensor, others: list[Tensor]) -> tuple[float | None, float | None]:
    """Return the cosine with the mean direction of the others, and the part in their span."""
    if len(others) < MIN_RECENT:
        return None, None
    rows = torch.stack(others)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    squared = float(sketch @ sketch)
    along = (rows @ sketch).double()
    # Updates can be multiples of each other, so the inner products need a small ridge.
    products = (rows @ rows.T).double() + RIDGE * torch.eye(len(rows), dtype=torch.float64)
    inside = float(along @ torch.linalg.solve(products, along)) / squared if squared else 1.0
    return _cosine(sketch, rows.mean(0)), inside


def _repeats(measure: Measure, earlier: Iterable[Measure]) -> bool:
    limit = EQUAL * measure.norm
    # Nearly all have another norm, which is cheap to compare.
    alike = (other.sketch for other in earlier if abs(other.norm - measure.norm) <= limit)
    return any(float((measure.sketch - sketch).norm()) <= limit for sketch in alike)


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()).clamp_min(1e-30))
