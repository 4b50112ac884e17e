"""The GPU of a worker: one for each learner of a machine."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch

from vcasgd.gpus import VISIBLE
from vcasgd.worker_names import learner_of


@dataclass(frozen=True)
class OwnGpu:
    """A learner's GPU: its place, from 0, among the ``count`` that the machine's workers may use.

    ``count`` is 0 on a machine without one.
    """

    place: int = 0
    count: int = 0

    @property
    def device(self) -> str:
        """The device for people."""
        if not self.count:
            return "cpu"
        name = ""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            name = f" ({torch.cuda.get_device_name()})"
        return f"GPU {self.place}{name}"


def choose_gpu(
    worker: str,
    *,
    environment: MutableMapping[str, str] = os.environ,
    count: Callable[[], int] = torch.cuda.device_count,
) -> OwnGpu:
    """Make this process see only one GPU, and return it; call it before CUDA is used.

    Learners of a machine take turns over its GPUs, of which those in ``CUDA_VISIBLE_DEVICES`` are
    used if it is set. ``count`` returns their number and doesn't start CUDA.
    """
    total = count()
    if total == 0:
        return OwnGpu()
    listed = environment.get(VISIBLE)
    names = listed.split(",") if listed else [str(number) for number in range(total)]
    place = (learner_of(worker) - 1) % total
    environment[VISIBLE] = names[place].strip()
    return OwnGpu(place, total)
