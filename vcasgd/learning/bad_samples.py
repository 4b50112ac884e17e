"""Local steps without the samples whose loss or gradient isn't finite: ``on_bad_sample: skip``.

If a step isn't finite, halves of its batch are tried until the samples are found that cause it.
Batches that can't be narrowed down are skipped as a whole. Buffers of the model, such as running
statistics, then return to their values before the step.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.errors import NonFiniteLoss, UserCodeError
from vcasgd.learning.base import buffers_of
from vcasgd.learning.precision import autocast
from vcasgd.learning.tolerant_loading import (
    BadSample,
    LoadedBatch,
    TolerantDataset,
    collated,
)
from vcasgd.learning.training import to_device
from vcasgd.task.task import Task, user_code

log = logging.getLogger(__name__)

#: Batches in a row that are skipped as a whole before the training counts as diverged.
MAX_WHOLE = 3
#: Newest bad samples that a worker names in its heartbeat.
KEPT = 10


def culprits(indices: Sequence[int], is_sound: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return the samples that make a batch unsound, by halves of those that are.

    Empty if all samples are sound on their own.
    """
    if is_sound(indices):
        return []
    if len(indices) == 1:
        return list(indices)
    middle = len(indices) // 2
    parts = indices[:middle], indices[middle:]
    return [bad for part in parts for bad in culprits(part, is_sound)]


class BadSamples:
    """The bad samples that one worker found, and the steps without them."""

    def __init__(self, task: Task, dataset: Dataset[Any], device: torch.device | str) -> None:
        self._task, self._device = task, device
        self._dataset = TolerantDataset(dataset)
        #: The newest ones.
        self.found: deque[BadSample] = deque(maxlen=KEPT)
        #: Batches in a row that were skipped as a whole.
        self._whole = 0

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parts: Iterable[tuple[LoadedBatch, float]],
        make: Callable[[Iterable[tuple[Any, float]]], float],
    ) -> tuple[float, int]:
        """Make a step with the good samples of a batch, if it has any.

        ``make`` makes a step with micro-batches and their shares. Returns the mean loss, 0 without
        a step, and the number of good samples. Raises :class:`NonFiniteLoss` if too many batches
        in a row had to be skipped as a whole, and :class:`UserCodeError`.
        """
        loaded = [part for part, _ in parts]
        self._note(*(bad for part in loaded for bad in part.bad))
        good = [index for part in loaded for index in part.indices]
        if not good:
            return 0.0, 0
        restore = _kept_buffers(model)
        loss, error = self._try(make, loaded)
        if error is not None:
            restore()
            bad = self._culprits(model, optimizer, good, restore)
            optimizer.zero_grad(set_to_none=True)
            loss, left = self._step_with([each for each in good if each not in bad], make)
            if not left:
                restore()
                self._skip_whole(good, error)
                return 0.0, 0
            self._note(*(BadSample(index, error.message) for index in sorted(bad)))
            good = left
        self._whole = 0
        return loss, len(good)

    def _step_with(
        self, left: list[int], make: Callable[[Iterable[tuple[Any, float]]], float]
    ) -> tuple[float, list[int]]:
        """Make a step with the samples that are left; return no samples if it can't be made."""
        if left:
            try:
                loss, error = self._try(make, [self._load(left)])
            except UserCodeError as problem:
                log.debug("no step without the bad samples: %s", problem)
            else:
                return loss, [] if error is not None else left
        return 0.0, []

    def _try(
        self, make: Callable[[Iterable[tuple[Any, float]]], float], loaded: Sequence[LoadedBatch]
    ) -> tuple[float, NonFiniteLoss | None]:
        total = sum(len(part.indices) for part in loaded)
        parts = ((part.batch, len(part.indices) / total) for part in loaded if part.indices)
        try:
            loss = make(parts)
        except NonFiniteLoss as error:
            return 0.0, error
        if not math.isfinite(loss):
            # The loop of a script, which made no step then.
            return 0.0, NonFiniteLoss(f"the loss is {loss}")
        return loss, None

    def _culprits(
        self, model: nn.Module, optimizer: Optimizer, good: list[int], restore: Callable[[], None]
    ) -> set[int]:
        """Return the samples that are not finite on their own; all if that can't be found out."""
        if self._task.makes_steps:
            return set(good)

        def is_sound(indices: Sequence[int]) -> bool:
            # Normalization needs two samples.
            batch = self._load([*indices] * (2 if len(indices) == 1 else 1)).batch
            optimizer.zero_grad(set_to_none=True)
            sound = self._is_finite(model, batch)
            restore()
            return sound

        try:
            return set(culprits(good, is_sound))
        except UserCodeError as error:
            log.debug("the bad samples of a batch can't be found: %s", error)
            return set(good)

    def _is_finite(self, model: nn.Module, batch: Any) -> bool:
        with user_code("loss"), autocast(self._task, self._device):
            loss: Tensor = self._task.loss(model, to_device(batch, self._device))
        with user_code("backward of the loss"):
            if not bool(torch.isfinite(loss.detach()).all()):
                return False
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return math.isfinite(float(torch.nn.utils.get_total_norm(gradients)))

    def _load(self, indices: Sequence[int]) -> LoadedBatch:
        with user_code("dataset"):
            batch = collated(self._task.collate, self._dataset.__getitems__(indices))
        if len(batch.indices) < len(indices):
            raise UserCodeError("a sample could be loaded only once")
        return batch

    def _skip_whole(self, indices: list[int], error: NonFiniteLoss) -> None:
        self._whole += 1
        if self._whole > MAX_WHOLE:
            self._whole = 0
            raise error
        self._note(
            *(BadSample(index, f"{error.message}, with its whole batch") for index in indices)
        )

    def _note(self, *bad: BadSample) -> None:
        for sample in bad:
            log.warning("sample %d is skipped: %s", sample.index, sample.why)
            self.found.append(sample)


def _kept_buffers(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives the model's buffers their present values again."""
    kept = {name: buffer.detach().clone() for name, buffer in buffers_of(model).items()}

    def restore() -> None:
        with torch.no_grad():
            for name, buffer in buffers_of(model).items():
                if name in kept:
                    buffer.copy_(kept[name])

    return restore
