"""The audit's task with a trace: a line for each local step, but for rehearsed ones."""

import os
import traceback
from typing import Any

from torch import Tensor, nn

from vcasgd.chaos.task.audit import Audit


class Traced(Audit):
    def __init__(self, trace: str, **args: Any) -> None:
        super().__init__(**args)
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if any(frame.f_code.co_name == "rehearse" for frame, _ in traceback.walk_stack(None)):
            return super().loss(model, batch)
        samples = " ".join(str(sample) for sample in batch.tolist())
        # A write to a file opened for appending is atomic, and survives the process.
        os.write(self._trace, f"{os.getpid()} {samples}\n".encode())
        return super().loss(model, batch)
