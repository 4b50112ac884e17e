"""Learning rates over the job's progress, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError
from vcasgd.task.task import Task, calling_user_code


class Rates:
    """Learning rates of an optimizer's groups.

    A group's rate is the user's rate times ``factor`` times the factor of the task's ``schedule``
    times the ``correction`` of the group. Groups without a rate stay as they are.
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
        self._given = [
            (group, group["lr"] * factor) for group in optimizer.param_groups if "lr" in group
        ]

    def follow(self, progress: float) -> None:
        """Set the rates for a step at ``progress``, a share of the job in [0, 1).

        Raises :class:`UserCodeError`.
        """
        factor = self._factor(progress)
        for group, rate in self._given:
            group["lr"] = rate * factor * self._correction(group)

    def _factor(self, progress: float) -> float:
        try:
            factor = float(self._task.schedule(progress))
        except Exception as error:
            raise calling_user_code("schedule", error) from error
        if not 0 <= factor < math.inf:
            raise UserCodeError(
                f"schedule returned {factor} at {progress:.1%} of the job",
                remedy="return a factor of the learning rate, a finite number of at least 0",
            )
        return factor


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
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, most * factor))
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
