"""Loader for a loop that makes its own steps: a plain one, or one with Accelerate.

Hooks of the optimizer see the steps, so the loop needs no calls of the session.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError
from vcasgd.learning.local_step import to_device
from vcasgd.learning.rates import clip
from vcasgd.session.launch import check_launch
from vcasgd.session.schedules import start_rates
from vcasgd.session.script import LoopTask, ScriptTask


class BatchLoader:
    """Iterable over the batches of a data set, on the model's device.

    On its own, it yields the batches of ``loader``, one epoch for each iteration. In a job, the
    first iteration yields the batches of the worker's leases until the job ends. It is no
    ``DataLoader``, so ``Accelerator.prepare`` returns it as it is and reads no batch ahead.
    """

    def __init__(
        self,
        task: LoopTask,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        script: ScriptTask | None,
    ) -> None:
        self._task, self._optimizer, self._loader, self._script = task, optimizer, loader, script
        self._batch_pending = False
        self._steps = 0
        #: Sum of the losses of the present batch.
        self._loss: Tensor | None = None
        #: Learning rates of the present batch in a job.
        self._rates: list[Any] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def __len__(self) -> int:
        """Return the number of batches of an epoch on one machine."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; each needs one step of the optimizer before the next one.

        Raises :class:`SpecError` for a launch that a job can't follow, and :class:`UserCodeError`
        if a step is missing.
        """
        check_launch()
        return self._batches_of_job(self._script) if self._script else self._local()

    def _local(self) -> Iterator[Any]:
        assert self._task.network is not None, "a session has started"
        device = next(self._task.network.parameters()).device
        for batch in self._loader:
            self._batch_pending = True
            yield to_device(batch, device)
            self._check_stepped()

    def _batches_of_job(self, script: ScriptTask) -> Iterator[Any]:
        scheduled = any("initial_lr" in group for group in self._optimizer.param_groups)
        if scheduled and self._task.user_schedule is None:
            raise SpecError(
                "task: the script's scheduler counts the steps of one worker, not those of the job",
                remedy="pass it to the session: "
                "Session(model, optimizer, schedule=scheduler, schedule_steps=…)",
                field="task",
            )
        start_rates(self._optimizer)
        self._task.makes_steps = True
        _record_losses()
        _loader_of_thread.set(self)
        for batch in script.batches():
            self._batch_pending, self._loss = True, None
            self._rates = self._present_rates()
            yield batch
            self._check_stepped()
            script.submit(self._seen_loss())

    def _check_stepped(self) -> None:
        if self._batch_pending:
            raise UserCodeError(
                "a batch ended without optimizer.step",
                remedy="make one step for each batch of session.loader; instead of "
                "accumulating gradients over several batches, use a larger batch_size",
            )

    def record(self, loss: Tensor) -> None:
        """Add a loss of the present batch, which ``backward`` was called for."""
        self._loss = loss if self._loss is None else self._loss + loss

    # -- hooks of the optimizer ----------------------------------------------------------------

    def _before_step(self, *_: Any) -> None:
        if not self._batch_pending:
            raise UserCodeError(
                "optimizer.step was called twice for one batch, or without a batch",
                remedy="call it once for each batch of session.loader",
            )
        self._steps += 1
        if self._script:
            self._check_rates()
            self._check_loss()
        clip(self._task, self._optimizer, self._steps)

    def _after_step(self, *_: Any) -> None:
        self._batch_pending = False

    def _present_rates(self) -> list[Any]:
        return [group.get("lr") for group in self._optimizer.param_groups]

    def _check_rates(self) -> None:
        if self._present_rates() != self._rates:
            raise UserCodeError(
                "the loop changed the learning rate, which a job sets for each step",
                remedy="pass schedule=… to the session, a factor for each progress",
            )

    def _seen_loss(self) -> Tensor:
        if self._loss is None:
            raise UserCodeError(
                "optimizer.step was called without loss.backward",
                remedy="call backward for each batch of session.loader; a job records its loss",
            )
        return self._loss

    def _check_loss(self) -> None:
        if not math.isfinite(value := float(self._seen_loss())):
            raise NonFiniteLoss(
                f"the loss is {value} in local step {self._steps}",
                remedy="lower the learning rate, clip gradients, or check the data for NaN",
                step=self._steps,
            )


def loader_over(data: Dataset[Any] | DataLoader[Any], batch_size: int | None) -> DataLoader[Any]:
    """Return a shuffled loader over a data set, or a given one, with ``batch_size`` if not None.

    Raises :class:`SpecError` for data without an index, and a loader with its own sampler.
    """
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise SpecError(
            "task: iterable data can't be used: each sample needs an index, so that it counts "
            "exactly once",
            remedy="use a map-style data set, with __len__ and __getitem__",
            field="task",
        )
    if not isinstance(data, DataLoader):
        return DataLoader(dataset, batch_size or LoopTask.batch_size, shuffle=True)
    loader = evenly_drawn(data)
    if batch_size in (None, loader.batch_size):
        return loader
    return DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )


def evenly_drawn(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader if a seeded permutation can replace its order, or raise SpecError."""
    sampler = loader.sampler
    even = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement
    )
    if loader.batch_size is None or not even:
        raise SpecError(
            "task: a session can't keep the order of a DataLoader with its own sampler",
            remedy="pass the data set; each epoch then contains every sample once",
            field="task",
        )
    return loader


#: Loader whose batches this thread trains.
_loader_of_thread: ContextVar[BatchLoader | None] = ContextVar("vcasgd_loader", default=None)

_backward: Any = torch.autograd.backward


def _record_losses() -> None:
    """Make ``backward`` record losses, because hooks of an optimizer don't get their values."""
    torch.autograd.backward = _recorded_backward


def _recorded_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    loader = _loader_of_thread.get()
    if loader is not None and isinstance(tensors, Tensor) and tensors.numel() == 1:
        loader.record(tensors.detach())
    _backward(tensors, *args, **kwargs)
