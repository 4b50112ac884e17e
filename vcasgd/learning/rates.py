"""Learning rates over the job's progress, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError
from vcasgd.learning.optimizers import trained_by
from vcasgd.task.place import Place
from vcasgd.task.task import Task, user_code

_GroupRate = tuple[dict[str, Any], float]


class Rates:
    """Learning rates of an optimizer's groups.

    A group's rate is the user's rate times ``factor`` times the factor of the task's ``schedule``
    times the ``correction`` of the group. Groups without a rate stay as they are. If the task has
    schedulers, its ``step_options`` replace the user's rate, and other options of the groups.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        correction: Callable[[dict[str, Any]], float] = lambda _: 1.0,
        *,
        factor: float = 1.0,
    ) -> None:
        self._task = task
        self._correction = correction
        self._groups, self._lowered = optimizer.param_groups, factor
        #: Rates of the last step, and what became of those that the loop has set.
        self._last: list[float] = []
        self._set: dict[int, float] = {}
        self._given = [
            (group, group["lr"] * factor) for group in optimizer.param_groups if "lr" in group
        ]

    def follow(self, place: Place) -> None:
        """Set the rates for a step at a place of the job. Raises :class:`UserCodeError`."""
        factor = self._factor(place.progress)
        rates = [(group, rate * factor * self._correction(group)) for group, rate in self._given]
        options = self._options(place)
        if options is not None:
            rates = []
            for group, present in zip(self._groups, options, strict=True):
                others = {name: value for name, value in present.items() if name != "lr"}
                set_options(group, others)
                if "lr" in present:
                    rate = present["lr"] * self._lowered * factor * self._correction(group)
                    rates.append((group, rate))
        # Also while the loop sets none: one can begin after its first step.
        before, self._last = self._last, [rate for _, rate in rates]
        if self._task.sets_rates:
            rates = self._unless_set(rates, before)
        for group, rate in rates:
            set_options(group, {"lr": rate})

    def _unless_set(self, rates: list[_GroupRate], before: list[float]) -> list[_GroupRate]:
        """Return the rates that differ from those ``before``; until then, a loop may set others."""
        changed = []
        for nth, (group, rate) in enumerate(rates):
            if before[nth : nth + 1] != [rate]:
                changed.append((group, rate))
            elif self._lowered != 1 and group["lr"] not in (rate, self._set.get(nth)):
                changed.append((group, group["lr"] * self._lowered))
                self._set[nth] = changed[-1][1]
        return changed

    def _options(self, place: Place) -> Sequence[Mapping[str, Any]] | None:
        with user_code("a scheduler"):
            return self._task.step_options(place)

    def _factor(self, progress: float) -> float:
        with user_code("schedule"):
            factor = float(self._task.schedule(progress))
        if not 0 <= factor < math.inf:
            raise UserCodeError(
                f"schedule returned {factor} at {progress:.1%} of the job",
                remedy="return a factor of the learning rate, a finite number of at least 0",
            )
        return factor


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set options of an optimizer's group; one that is a tensor keeps its identity."""
    for name, value in options.items():
        if isinstance(present := group.get(name), torch.Tensor):
            present.fill_(value)
        else:
            group[name] = value


def clip(
    task: Task,
    optimizer: Optimizer,
    step: int,
    factor: float = 1.0,
    *,
    may_overflow: bool = False,
) -> None:
    """Scale an optimizer's gradients so that their total norm is at most ``task.clip_norm`` times
    ``factor``.

    Without ``clip_norm``, it only checks the gradients, and only if the job skips bad samples. A
    step whose gradients ``may_overflow`` is skipped if they do. Raises :class:`NonFiniteLoss` and
    :class:`SpecError`.
    """
    most = clip_norm_of(task)
    if most is None:
        if not task.skips_bad_samples:
            return
        most = math.inf  # only to find gradients that are not finite
    norm = float(torch.nn.utils.clip_grad_norm_(trained_by(optimizer), most * factor))
    # a finite loss can have a gradient that is not finite, and clipping would make all of it NaN
    if not math.isfinite(norm) and not may_overflow:
        raise NonFiniteLoss(
            f"the norm of the gradient is {norm} in local step {step}",
            remedy="lower the learning rate, or check the loss for a division by 0",
            step=step,
        )


def clip_norm_of(task: Task) -> float | None:
    """Return the task's ``clip_norm``. Raises :class:`SpecError` if it is invalid."""
    norm: Any = task.clip_norm
    if norm is None:
        return None
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 < norm < math.inf:
        raise SpecError(
            f"task: clip_norm is {norm!r}, not a number above 0",
            remedy="leave it out if gradients are not to be clipped",
            field="task",
        )
    return float(norm)
