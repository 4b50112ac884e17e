"""Momentum that asynchrony adds, and the part of the optimizer's momentum that remains.

g workers that push independently act on the model like momentum ``1 − 1/g`` (Mitliagkas 2016,
arXiv 1605.09774, theorem 2). Omnivore (Hadjis 2016, arXiv 1606.04487) lowers the explicit momentum
by this amount. Here g is measured, not counted. Between two updates of a worker, every other worker
makes r_other/r_own updates, where r are their rates. The mean over all updates is
``(g·R − R)/R = g − 1`` for R = Σr, whatever the rates are. So ``g = 1 + mean staleness``, and a
slow or lost worker counts for as little as it contributes.

The theorem covers single gradients that are added. If an update is many local steps, or is averaged
into the model, it is only a guide: the sum of both momenta is kept at the user's value.

Momentum μ of SGD lengthens each step to lr/(1−μ) eventually; momentum from asynchrony only delays
it. Without explicit momentum the step would become shorter, so the learning rate is raised by the
same factor. Adam normalizes its averages and needs no correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: Not 0: optimizers create their buffer only if there is momentum, and may need it later.
MIN_MOMENTUM = 0.001
#: Change of the estimate that replaces the previous one.
CHANGE = 0.05


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
    return estimate if abs(estimate - before) >= CHANGE else before


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
