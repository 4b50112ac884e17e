"""Variants of the audit's task: with a slow machine, momentum, or a falling accuracy."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vcasgd.chaos.task.audit import Audit


class Uneven(Audit):
    """The process that creates ``slow`` takes ``slow_seconds`` longer for each step."""

    def __init__(self, slow: str, slow_seconds: float, **args: Any) -> None:
        super().__init__(**args)
        try:
            Path(slow).touch(exist_ok=False)
        except FileExistsError:
            slow_seconds = 0.0
        else:
            Path(slow).write_text(str(os.getpid()))
        self._slow_seconds = slow_seconds

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if self.hold is None or self.hold.exists():
            time.sleep(self._slow_seconds)
        return super().loss(model, batch)


class Rolling(Audit):
    """A task with momentum; the trace has the momentum of each step."""

    def __init__(self, trace: str, **args: float) -> None:
        super().__init__(**args)
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        optimizer.register_step_pre_hook(self._write)
        return optimizer

    def _write(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        os.write(self._trace, f"{optimizer.param_groups[0]['momentum']}\n".encode())


class Worsening(Audit):
    """A task whose accuracy falls with each epoch."""

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        sums = super().evaluate(model, batch)
        return {**sums, "accuracy": sums["count"] - sums["applied"] / 10}
