"""Mixed precision of local steps: autocast, and a scaler of gradients for float16."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.errors import NonFiniteLoss, SpecError
from vcasgd.learning.optimizers import Closure
from vcasgd.task.task import Task

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Steps in a row that the scaler may skip. Each one halves the scale, which starts at 2¹⁶.
MAX_SKIPPED = 30


def dtype_of(task: Task) -> torch.dtype | None:
    """Return the type that a task computes in; None for that of the model.

    Raises :class:`SpecError`.
    """
    name: Any = task.mixed_precision
    if name is None:
        return None
    if name not in _TYPES:
        raise SpecError(
            f"task: mixed_precision is {name!r}", remedy='use None, "bf16", or "fp16"', field="task"
        )
    return _TYPES[name]


def autocast(task: Task, device: torch.device | str) -> AbstractContextManager[Any]:
    """Return the context of forward passes."""
    dtype = dtype_of(task)
    kind = torch.device(device).type
    return nullcontext() if dtype is None else torch.autocast(kind, dtype)


class StepPrecision:
    """Makes the steps of a task's optimizers, which a scaler skips if float16 overflows.

    The scale follows the gradients over all optimizers of a worker. A skipped step counts as
    trained, as in a plain loop.
    """

    def __init__(self, task: Task, device: torch.device | str) -> None:
        half = dtype_of(task) is torch.float16
        self._scaler = torch.amp.GradScaler(torch.device(device).type) if half else None
        #: Factor of the gradients of the next step.
        self.weight = 1.0
        #: Skipped steps in a row.
        self._skipped = 0

    @property
    def scales(self) -> bool:
        """True if gradients can overflow, so that their step is skipped."""
        return self._scaler is not None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to call ``backward`` for."""
        if self.weight != 1:
            loss = loss * self.weight
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(
        self,
        optimizer: Optimizer,
        clip: Callable[[], None],
        number: int,
        closure: Closure | None = None,
    ) -> None:
        """Clip the gradients and make one step. Raises :class:`NonFiniteLoss`.

        ``number`` is the step's number in error messages.
        """
        if self._scaler is None:
            clip()
            if closure is None:
                optimizer.step()
            else:
                optimizer.step(closure)  # type: ignore[arg-type]
            return
        self._scaler.unscale_(optimizer)
        clip()
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        self._skipped = self._skipped + 1 if self._scaler.get_scale() < before else 0
        if self._skipped > MAX_SKIPPED:
            raise NonFiniteLoss(
                f"the gradient is not finite in {self._skipped} local steps in a row, "
                "although its scale was lowered",
                remedy="use bf16, lower the learning rate, or check the loss for a division by 0",
                step=number,
            )
