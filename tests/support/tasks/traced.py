"""The audit's task with a trace: a line for each local step, but for rehearsed ones."""

import os
import time
import traceback
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vcasgd.chaos.task.audit import Audit

#: Limit for the seconds that are added to a local step near the end of a held job.
MAX_EXTRA_SECONDS = 5.0


class Traced(Audit):
    """``hold`` has the number of samples that the job trains.

    While it exists, local steps of the job's second half take ever longer, so that the job doesn't
    end before a test on a slow machine has done what it does while the job trains.
    """

    def __init__(self, trace: str, **args: Any) -> None:
        super().__init__(**args)
        self._path = Path(trace)
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if any(frame.f_code.co_name == "rehearse" for frame, _ in traceback.walk_stack(None)):
            return super().loss(model, batch)
        samples = " ".join(str(sample) for sample in batch.tolist())
        # A write to a file opened for appending is atomic, and survives the process.
        os.write(self._trace, f"{os.getpid()} {samples}\n".encode())
        self._linger()
        return super().loss(model, batch)

    def _linger(self) -> None:
        try:
            total = int(self.hold.read_text()) if self.hold is not None else 0
        except FileNotFoundError:
            return
        # Each sample in the trace follows a blank.
        left = max(1, total - self._path.read_bytes().count(b" "))
        longer = self.step_seconds * (max(1.0, total / 2 / left) ** 3 - 1)
        until = time.monotonic() + min(longer, MAX_EXTRA_SECONDS)
        while time.monotonic() < until and self.hold is not None and self.hold.exists():
            time.sleep(0.01)
