"""The audit's task with a slow machine."""

import os
import time
from pathlib import Path
from typing import Any

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
