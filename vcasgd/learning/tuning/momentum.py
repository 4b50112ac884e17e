"""Momentum that asynchrony adds, and how much of the optimizer's own is then left.

g workers that push without waiting for one another act on the model like momentum ``1 − 1/g``
(Mitliagkas 2016, arXiv 1605.09774, theorem 2; Hadjis 2016, Omnivore, arXiv 1606.04487, which lowers
the explicit momentum by it). g is not counted but measured. Between two updates of a worker every
other worker makes r_other/r_own of them, if r are their rates; the mean over all updates, each
worker counted as often as it pushes, is ``(g·R − R)/R = g − 1`` for R = Σr, whatever the rates are.
So ``g = 1 + mean staleness``, and a worker that waits or is gone counts as little as it works.

The theorem is of single gradients that are added. Where an update is many local steps, or is
averaged into the model, it is a guide: the sum of both momenta is held at what the user gave.

Momentum μ of SGD lengthens each step to lr/(1−μ) in the end; that of asynchrony only delays it. So
without the explicit momentum the step would become short, and the learning rate is raised by as
much. Adam's averages are normalised and need nothing.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

#: not 0: optimizers make their buffer only where there is momentum, and may miss it later
LEAST_MOMENTUM = 0.001
#: by what an estimate has to change to be told anew
CHANGE = 0.05


def implicit(staleness_mean: float) -> float:
    """What asynchrony adds, in [0, 1): ``1 − 1/g`` for g = 1 + mean staleness."""
    return 1 - 1 / (1 + max(staleness_mean, 0.0))


def explicit(given: float, asynchrony: float) -> float:
    """What is left of the ``given`` momentum where asynchrony adds so much."""
    return min(given, max(LEAST_MOMENTUM, given - asynchrony))


def settled(estimate: float, before: float) -> float:
    """The estimate, or the one before where it is nearly the same."""
    return estimate if abs(estimate - before) >= CHANGE else before


class Momenta:
    """The momenta that the user gave to an optimizer: ``momentum``, and the first of ``betas``.
    Groups that have neither stay as they are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._given = [
            (group, name, given)
            for group in optimizer.param_groups
            for name in ("momentum", "betas")
            if (given := _of(group, name)) is not None
        ]

    def follow(self, asynchrony: float) -> float | None:
        """Lowers each by what asynchrony adds. Returns that of the first group; None where there
        is none."""
        for group, name, given in self._given:
            _set(group, name, explicit(given, asynchrony))
        return _of(*self._given[0][:2]) if self._given else None

    def correction(self, group: dict[str, Any]) -> float:
        """By what a group's learning rate is multiplied, so that lr/(1−μ) stays what it was."""
        for known, name, given in self._given:
            if known is group and name == "momentum":
                return (1 - float(group[name])) / (1 - given)
        return 1.0


def _of(group: dict[str, Any], name: str) -> float | None:
    value = group.get(name)
    value = value[0] if name == "betas" and value else value
    return float(value) if isinstance(value, int | float) and 0 < value < 1 else None


def _set(group: dict[str, Any], name: str, value: float) -> None:
    group[name] = (value, *group[name][1:]) if name == "betas" else value
