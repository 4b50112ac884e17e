"""Decisions of self-tuning: pure functions of measurements and of the current settings.

No decision changes for a small difference: each stays until measurements differ by more than their
usual noise.

**Local steps** between two pushes, by speed. Asynchronous Local-SGD (Liu 2024, arXiv 2401.09135,
"dynamic local updates"): a worker whose local step takes ``t`` seconds makes ``H·t_min/t`` steps
between two pushes; the fastest worker makes H.

**Momentum.** g workers that push independently act on the model like momentum ``1 − 1/g``
(Mitliagkas 2016, arXiv 1605.09774, theorem 2). Omnivore (Hadjis 2016, arXiv 1606.04487) lowers the
explicit momentum by this amount. Here g is measured, not counted. Between two updates of a worker,
every other worker makes r_other/r_own updates, where r are their rates. The mean over all updates
is ``(g·R − R)/R = g − 1`` for R = Σr, whatever the rates are. So ``g = 1 + mean staleness``, and a
slow or lost worker counts for as little as it contributes.

The theorem covers single gradients that are added. If an update is many local steps, or is averaged
into the model, it is only a guide: the sum of both momenta is kept at the user's value.

Momentum μ of SGD lengthens each step to lr/(1−μ) eventually; momentum from asynchrony only delays
it. Without explicit momentum the step would become shorter, so the learning rate is raised by the
same factor. Adam normalizes its averages and needs no correction.

**Weight of updates**: reduced while validation worsens, and raised again when it improves. The
factor depends only on the evaluations in the ledger, so a restarted controller computes the same
one.

**Learners on a machine.** A machine gets another learner as long as that raises its throughput by
more than a tenth, and loses one that does not (CROSSBOW, Koliousis 2019, arXiv 1901.02244, section
4.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: The shortest interval as a share of the longest. A slower worker pushes less often instead of
#: after every step, and a worker that reports a wrong speed can't shorten all intervals to nothing.
MIN_SHARE = 1 / 16
#: Relative change that replaces a share; the duration of a step varies by a few percent.
SHARE_CHANGE = 0.15


def shares_by_speed(seconds: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return each worker's share of the push interval, in (0, 1].

    ``seconds`` is the duration of a local step of each worker; a worker without a finite number
    above 0 is left out. ``before`` has the current shares; a missing one is 1.
    """
    durations = {name: value for name, value in seconds.items() if isfinite(value) and value > 0}
    fastest = min(durations.values(), default=0.0)
    return {
        name: _smoothed(max(MIN_SHARE, fastest / value), before.get(name, 1.0))
        for name, value in durations.items()
    }


def local_steps(interval: int, share: float) -> int:
    """Return the local steps of a share of an interval, at least 1."""
    return max(1, round(interval * min(share, 1.0)))


def _smoothed(share: float, before: float) -> float:
    return before if abs(share - before) <= SHARE_CHANGE * before else share


#: Not 0: optimizers create their buffer only if there is momentum, and may need it later.
MIN_MOMENTUM = 0.001
#: Change of the estimate that replaces the previous one.
MOMENTUM_CHANGE = 0.05


def implicit_momentum(staleness_mean: float) -> float:
    """Return the momentum that asynchrony adds, in [0, 1).

    It is ``1 − 1/g`` for g = 1 + mean staleness.
    """
    return 1 - 1 / (1 + max(staleness_mean, 0.0))


def explicit_momentum(original: float, asynchrony: float) -> float:
    """Return the ``original`` momentum of an optimizer minus the momentum of asynchrony."""
    return min(original, max(MIN_MOMENTUM, original - asynchrony))


def smoothed_momentum(estimate: float, before: float) -> float:
    """Return the new estimate, or the previous one if the two are close."""
    return estimate if abs(estimate - before) >= MOMENTUM_CHANGE else before


class Momenta:
    """Momenta of an optimizer's groups: ``momentum``, or the first of ``betas``.

    Groups with neither stay as they are.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._original = [
            (group, name, original)
            for group in optimizer.param_groups
            for name in ("momentum", "betas")
            if (original := _momentum(group, name)) is not None
        ]

    def follow(self, asynchrony: float) -> float | None:
        """Lower each of the user's momenta by the momentum of asynchrony.

        Returns the momentum of the first group, or None if no group has one.
        """
        for group, name, original in self._original:
            _set_momentum(group, name, explicit_momentum(original, asynchrony))
        return _momentum(*self._original[0][:2]) if self._original else None

    def correction(self, group: dict[str, Any]) -> float:
        """Return the factor of a group's learning rate that keeps lr/(1−μ) constant."""
        for each, name, original in self._original:
            if each is group and name == "momentum":
                return (1 - float(group[name])) / (1 - original)
        return 1.0


def _momentum(group: dict[str, Any], name: str) -> float | None:
    value = group.get(name)
    value = value[0] if name == "betas" and value else value
    return float(value) if isinstance(value, int | float) and 0 < value < 1 else None


def _set_momentum(group: dict[str, Any], name: str, value: float) -> None:
    group[name] = (value, *group[name][1:]) if name == "betas" else value


#: Consecutive evaluations worse than the best that reduce the weight; a single one is noise.
PATIENCE = 2
#: Changes of the weight: one reduction takes two improvements to undo, so recovery is slower.
REDUCTION, INCREASE = 1 / 2, sqrt(2)
#: The smallest factor; updates keep some weight, so that the model can recover.
LEAST = 1 / 16


def factor_after(qualities: Iterable[float]) -> float:
    """Return the factor of the weight of updates, in [1/16, 1].

    ``qualities`` are those of all evaluations, oldest first. A quality that is not finite counts
    as worse than any other.
    """
    best, worse, factor = float("-inf"), 0, 1.0
    for quality in qualities:
        if not isfinite(quality) or quality < best:
            worse += 1
        elif quality > best:
            best, worse, factor = quality, 0, min(1.0, factor * INCREASE)
        if worse == PATIENCE:
            worse, factor = 0, max(LEAST, factor * REDUCTION)
    return factor


#: An additional learner must multiply the throughput of its machine by more than this.
GAIN = 1.1
#: Share of the memory of a machine and of its GPU that stays free, for peaks of the data's needs
#: and for the start of another learner.
RESERVE = 0.1


@dataclass(frozen=True)
class Load:
    """Measurements of one machine.

    ``rate``: local steps per second of all its learners. ``room``: further learners that fit into
    its memory; negative if there are too many. ``cores``: its processor cores.
    """

    rate: float
    room: int
    cores: int


@dataclass(frozen=True)
class Trial:
    """State of the search on one machine.

    ``learners`` is the current number. ``rates`` are the measured steps per second by number of
    learners. No higher number is tried before ``closed_until`` (Unix seconds).
    """

    learners: int = 1
    rates: Mapping[int, float] = field(default_factory=dict)
    closed_until: float = 0.0


def next_trial(trial: Trial, load: Load, most: int, now: float, rest: float) -> Trial:
    """Return the trial that follows a measurement with ``trial.learners``.

    ``most``: learners that the job allows on a machine. ``rest``: seconds before a number that did
    not help is tried again.
    """
    count, rates = trial.learners, {**trial.rates, trial.learners: load.rate}
    before = rates.get(count - 1)
    most = max(1, min(most, load.cores, count + load.room))
    if count > most or (before is not None and load.rate <= GAIN * before):
        return fewer(replace(trial, rates=rates), now, rest)
    if count < most and now >= trial.closed_until:
        return Trial(count + 1, {count: load.rate})
    return replace(trial, rates=rates)


def fewer(trial: Trial, now: float, rest: float) -> Trial:
    """Return a trial with one learner less, at least 1, that tries no more for ``rest`` seconds."""
    count = max(1, trial.learners - 1)
    rates = {learners: rate for learners, rate in trial.rates.items() if learners <= count}
    return Trial(count, rates, now + rest)


def room_for(available: float, total: float, own: float) -> int:
    """Return how many more learners of ``own`` bytes fit into a memory of ``total`` bytes.

    ``available``: free bytes of the memory.
    """
    return int((available - RESERVE * total) // max(own, 1.0))
