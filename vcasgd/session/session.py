"""``Session``: the other way in, around a training loop that is there already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.rates import Rates
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.learning.training import batches, descend, evaluate, to_device
from vcasgd.session.script import Evaluate, LoopTask, running_script


class Session:
    """The training loop of a script, which need not know where it runs::

        session = vcasgd.Session(model, optimizer)

        @session.evaluation(validation_set)
        def judge(model, batch):
            ...  # sums over the batch, and "count"

        for images, labels in session.batches(train_set, batch_size=64, epochs=20):
            session.step(F.cross_entropy(model(images), labels))

    Run with ``python train.py`` this is ordinary training in this process. As the ``task`` of a job
    it runs on each worker: the batches are those of the worker's leases, the model is replaced by
    the newest snapshot before each push interval, and the script ends in its loop when the job is
    over or the worker has to go. So what comes after the loop is done only where the script runs
    on its own.

    ``schedule`` and ``clip_norm`` are those of :class:`vcasgd.Task`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        schedule: Callable[[float], float] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self._script = running_script()
        self._task = self._script or LoopTask()
        self._task.learns(model, optimizer)
        self._task.schedule_of = schedule
        self._task.clip_norm = clip_norm
        self._model = model
        self._optimizer = optimizer
        self._in_hand = False
        self._steps = 0
        #: the means of the last evaluation, and ``"count"``; empty before it and on workers
        self.metrics: dict[str, float] = {}

    def evaluation(
        self, dataset: Dataset[Any], batch_size: int = 512
    ) -> Callable[[Evaluate], Evaluate]:
        """Decorates the function that judges the model at the end of each epoch; it is as
        :meth:`vcasgd.Task.evaluate`. On workers there must be one, before the loop begins."""

        def register(function: Evaluate) -> Evaluate:
            self._task.is_judged(function, dataset, batch_size)
            return function

        return register

    def batches(
        self,
        data: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Batches on the model's device; :meth:`step` is to be called once for each.

        Of a loader its data set, batch size and collate function are used; the order is drawn
        anew, and no sample is dropped. ``batch_size`` is 64 unless it is said. ``epochs`` is how
        often a script that runs on its own goes over the data; that of a job is in ``job.yaml``,
        and its first call of this method is for all of them.

        Raises :class:`SpecError` for a loader whose batches are not drawn evenly from a map-style
        data set, and :class:`UserCodeError` where a step was left out.
        """
        if isinstance(data, DataLoader):
            dataset = _evenly_drawn(data).dataset
            batch_size = batch_size or data.batch_size
            collate = collate or data.collate_fn
        else:
            dataset = data
        self._task.reads(dataset, batch_size or LoopTask.batch_size, collate or default_collate)
        source = self._script.batches() if self._script else self._alone(epochs)
        return self._handed_out(source)

    def step(self, loss: Tensor) -> None:
        """Backward of a mean loss, the optimizer's step, and gradients cleared: takes the place of
        ``loss.backward()``, ``optimizer.step()`` and ``optimizer.zero_grad()``.

        Raises :class:`~vcasgd.errors.NonFiniteLoss` before the parameters are harmed.
        """
        if not self._in_hand:
            raise UserCodeError(
                "session.step was called twice for one batch, or without one",
                remedy="call it once for each of session.batches",
            )
        self._in_hand = False
        if self._script:
            self._script.hand_in(loss)
            return
        self._steps += 1
        descend(self._task, self._optimizer, loss, self._steps)
        self._optimizer.zero_grad(set_to_none=True)

    def _handed_out(self, source: Iterator[Any]) -> Iterator[Any]:
        for batch in source:
            self._in_hand = True
            yield batch
            if self._in_hand:
                raise UserCodeError(
                    "a batch was left without session.step",
                    remedy="call it once for each of session.batches; a larger batch_size does "
                    "what adding up gradients over several batches does",
                )

    # -- in this process alone -----------------------------------------------------------------

    def _alone(self, epochs: int) -> Iterator[Any]:
        dataset = self._task.dataset("train")
        device = next(self._model.parameters()).device
        # follows torch.manual_seed, and differs where a script calls for one epoch at a time
        seed = int(torch.randint(2**32, ()))
        plan = EpochPlan(len(dataset), 1, epochs, seed)  # type: ignore[arg-type]
        rates = Rates(self._task, self._optimizer)
        for epoch in range(epochs):
            done = 0
            order = plan.indices(epoch, 0, plan.samples)
            for batch, count in batches(self._task, dataset, order):
                rates.follow(plan.progress(epoch, done))
                yield to_device(batch, device)
                done += count
            if self._task.judged:
                self._judge(epoch + 1, device)

    def _judge(self, epoch: int, device: torch.device) -> None:
        self.metrics = evaluate(
            self._task,
            self._model,
            self._task.dataset("validation"),
            device,
            should_stop=lambda: False,
            on_step=lambda: None,
        )
        means = (f"{name} {mean:.4f}" for name, mean in self.metrics.items() if name != "count")
        sys.stdout.write(f"epoch {epoch}: {', '.join(means)}\n")


def _evenly_drawn(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, if a seeded permutation can take the place of its order."""
    sampler = loader.sampler
    even = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement
    )
    if loader.batch_size is None or not even:
        raise SpecError(
            "task: session.batches can't keep the order of a DataLoader with a sampler of its own",
            remedy="hand over the data set; every sample of it is in each epoch once",
            field="task",
        )
    return loader
