"""A task whose workers record when the parts of each local step begin and end.

It wraps methods of the worker, in whose process it runs, and writes a line for each mark: the time
in seconds since 1970, the mark, and for :data:`NEWS` the time of the commit in milliseconds.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import vcasgd
from vcasgd.learning.local_model import LocalModel
from vcasgd.store.tensors.updates import UpdateSender
from vcasgd.worker.learner import Learner
from vcasgd.worker.trainer import Trainer

SAMPLES = 1 << 16
#: In the order in which they occur.
MARKS = (BEGIN, TRAIN, LOADED, STEP, GRADIENTS, TRAINED, ACCEPTED, NEWS) = (
    "begin", "train", "loaded", "step", "gradients", "trained", "accepted", "news",
)  # fmt: skip


class Timed(vcasgd.Task):
    """A model of ``numbers`` parameters that learns nothing.

    A step of ``batch_size`` samples on ``workers`` machines takes ``step_seconds`` from the call of
    ``loss`` until the gradients are there, ``busy_seconds`` of which it computes.
    """

    def __init__(
        self,
        folder: str,
        numbers: int,
        batch_size: int,
        workers: int,
        step_seconds: float,
        busy_seconds: float,
    ) -> None:
        self.batch_size = batch_size
        self._numbers = numbers
        # Workers that are a little faster get a few samples more.
        self._sample_seconds = step_seconds * workers / batch_size
        self._busy_seconds = busy_seconds
        self._end = 0.0
        record(Path(folder) / str(os.getpid()))

    def model(self) -> nn.Module:
        model = nn.Module()
        # Not zeros, which are encoded in less time.
        model.register_parameter("numbers", nn.Parameter(torch.randn(self._numbers)))
        model.numbers.register_post_accumulate_grad_hook(self._rest)
        return model

    def dataset(self, split: str) -> Dataset[Any]:
        return TensorDataset(torch.zeros(SAMPLES if split == "train" else 64))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        mark(STEP)
        self._end = time.monotonic() + self._sample_seconds * len(batch[0])
        compute(self._busy_seconds)
        return (model.numbers + batch[0].mean()).square().mean()

    def _rest(self, _parameter: Tensor) -> None:
        time.sleep(max(0.0, self._end - time.monotonic()))
        mark(GRADIENTS)

    def evaluate(self, _model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": torch.zeros(()), "count": torch.tensor(len(batch[0]))}


def compute(seconds: float) -> None:
    """Use so many seconds of a processor."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)


_file: Any = None


def mark(name: str, more: str = "") -> None:
    if _file is not None:
        _file.write(f"{time.time():.6f} {name} {more}\n")


def record(path: Path) -> None:
    """Record the marks of this process from now on."""
    global _file
    if _file is None:
        _file = path.open("w", buffering=1)
        wrap(Trainer, "_train_interval", BEGIN)
        wrap(Learner, "train", TRAIN, TRAINED)
        wrap(LocalModel, "load", after=LOADED)
        wrap(UpdateSender, "push", after=ACCEPTED)
        wrap(UpdateSender, "status_after_commit", after=NEWS, more=commit_of)


def commit_of(result: tuple[bytes, Any]) -> str:
    """Return the milliseconds in the ID of a commit."""
    return result[0].decode().partition("-")[0]


def wrap(
    owner: type,
    name: str,
    before: str = "",
    after: str = "",
    more: Callable[[Any], str] = lambda _: "",
) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            mark(before)
        result = method(*args, **kwargs)
        if after:
            mark(after, more(result))
        return result

    setattr(owner, name, wrapped)
