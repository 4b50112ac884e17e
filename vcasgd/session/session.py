"""Session for an existing training loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, default_collate

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.batch_source import BatchSource, SampleRange
from vcasgd.learning.model_evaluation import evaluate
from vcasgd.learning.optimizers import Closure, as_optimizer, takes_closure
from vcasgd.learning.precision import StepPrecision
from vcasgd.learning.rates import Rates
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.learning.training import backward, batch_size_of, parts_of, to_device, update
from vcasgd.learning.training_set import (
    LoaderData,
    TrainingSet,
    data_of,
    dataset_of,
    evaluation_data_of,
)
from vcasgd.session.loader import BatchLoader, loader_over
from vcasgd.session.schedules import check_rates, ignore_steps, learning_rates, schedule_of
from vcasgd.session.script import Evaluate, LoopInThread, LoopTask, running_script
from vcasgd.task.logged import collected
from vcasgd.task.loop_code import count_loops

#: Batches of a script on its own whose order is computed at once.
BATCHES_AT_ONCE = 1000


class Session:
    """Training loop of a script that runs unchanged on its own and as a job.

    For example::

        session = vcasgd.Session(model, optimizer)

        @session.evaluation(validation_set)
        def evaluate(model, batch):
            ...  # sums over the batch, and "count"

        for images, labels in session.batches(train_set, batch_size=64, epochs=20):
            session.step(F.cross_entropy(model(images), labels))

    ``python train.py`` trains as usual, in this process. As the ``task`` of a job, the script runs
    on each worker: the batches are those of the worker's leases, the newest snapshot replaces the
    model's values before each push interval, and the script ends inside its loop when the job ends
    or the worker has to leave. Code after the loop therefore runs only if the script runs on its
    own.

    A loop that calls ``backward`` and ``step`` itself, or through Accelerate, needs only its loader
    replaced::

        for images, labels in session.loader(train_loader):
            ...

    ``schedule``, ``clip_norm``, ``min_local_batch``, ``batch_weight``, and ``buffers`` mean the
    same as in :class:`vcasgd.Task`.
    ``schedule`` can also be a scheduler of torch that makes ``schedule_steps`` steps in the whole
    training. With ``mixed_precision="fp16"``, :meth:`step` scales gradients, and the loop computes
    its loss under ``torch.autocast``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        schedule: Callable[[float], float] | LRScheduler | None = None,
        *,
        schedule_steps: int | None = None,
        clip_norm: float | None = None,
        mixed_precision: str | None = None,
        min_local_batch: int | None = None,
        batch_weight: Callable[[Any], float | Tensor] | None = None,
        buffers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        several = isinstance(optimizer, list | tuple)
        optimizer = as_optimizer(optimizer if several else [optimizer])
        self._script = running_script()
        self._task = self._script or LoopTask()
        self._task.set_model(model, optimizer)
        in_job = self._script is not None
        self._task.scheduled = schedule_of(schedule, schedule_steps, in_job=in_job)
        self._scheduler = schedule if isinstance(schedule, LRScheduler) else None
        self._task.user_schedule = None if isinstance(schedule, LRScheduler) else schedule
        self._task.clip_norm = clip_norm
        self._task.mixed_precision = mixed_precision
        self._task.min_local_batch = min_local_batch
        self._task.user_weight = batch_weight
        self._task.buffers = buffers
        self._model = model
        self._optimizer = optimizer
        #: Learning rates of each optimizer in the present step.
        self._rates: list[list[Any]] = []
        self._batch_pending = False
        #: The loader in a job, for a loop that asks for one before each epoch.
        self._loader: BatchLoader | None = None
        self._steps = 0
        self._precision: StepPrecision | None = None
        #: Share of the present batch in its local step, and whether it is the last one of the step.
        self._share, self._ends_step = 1.0, True
        #: Means of the last evaluation, and ``"count"``; empty before the first one and on workers.
        self.metrics: dict[str, float] = {}

    def evaluation(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None
    ) -> Callable[[Evaluate], Evaluate]:
        """Register the decorated function to evaluate the model at the end of each epoch.

        ``batch_size`` defaults to that of a given loader, or 512.
        A job evaluates as often as ``evaluate.every`` in ``job.yaml`` says. The arguments and the
        result are those of :meth:`vcasgd.Task.evaluate`. A job requires an evaluation, registered
        before the loop starts.
        """

        def register(function: Evaluate) -> Evaluate:
            if isinstance(data, DataLoader):
                given = evaluation_data_of(data)
                size, collate = batch_size or given.batch_size, given.collate
                self._task.set_evaluation(function, given.dataset, size, collate)
            else:
                self._task.set_evaluation(function, data, batch_size or 512)
            return function

        return register

    def batches(
        self,
        data: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> Iterator[Any]:
        """Iterate over batches on the model's device. Call :meth:`step` once for each.

        From a loader, everything but ``drop_last`` is used: a shuffled one gets a new order, and
        one with a sampler, or without ``shuffle``, keeps its own. ``batch_size``
        defaults to 64. ``epochs`` is the number of passes over the data if the script runs on its
        own. A job takes the number from ``job.yaml``, and its first call covers all epochs. With
        ``gradient_accumulation_steps``, each ``batch_size`` samples come as so many batches, whose
        gradients :meth:`step` accumulates.

        Raises :class:`SpecError` for data whose samples have no numbers,
        and :class:`UserCodeError` if a step is missing.
        """
        if isinstance(data, DataLoader):
            given = data_of(data, batch_size)
            self._task.use_loader_settings(data)
        else:
            given = LoaderData(data, batch_size or LoopTask.batch_size, default_collate, None)
        self._task.set_data(
            given.dataset, given.batch_size, collate or given.collate, given.sampler
        )
        self._task.gradient_accumulation_steps = gradient_accumulation_steps
        if self._scheduler is not None:
            ignore_steps(self._scheduler)
        source = _of_job(self._script) if self._script else self._local_batches(epochs)
        return self._checked(source)

    def loader(
        self,
        data: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        gradient_accumulation_steps: int = 1,
    ) -> BatchLoader:
        """Return a loader for a loop that makes the steps of the optimizer itself.

        On its own, the script trains as without a session: ``data`` in its own order, if it is a
        loader, with the script's own scheduler. In a job, the batches are those of the worker's
        leases, and the loop ends when the job does. ``Accelerator.prepare`` leaves the loader as it
        is. ``batch_size`` defaults to that of a given loader, or 64.

        The loop makes one step for each batch. With ``gradient_accumulation_steps`` it calls
        ``backward`` for each batch with the loss divided by that number, and makes a step if
        :attr:`BatchLoader.ends_step` is True; the job's batch is so many times ``batch_size``. The
        number of an ``Accelerator`` needn't be repeated here. Called again, as before each epoch,
        it returns the same loader in a job.

        Raises :class:`SpecError` for data that a job can't use, and :class:`UserCodeError` for a
        second data set in a job.
        """
        if self._loader is not None:
            if self._loader.dataset is (data.dataset if isinstance(data, DataLoader) else data):
                return self._loader
            raise UserCodeError(
                "session.loader was called again with another data set, and a job trains one",
                remedy="call it once, and let set_epoch choose what an epoch has; other data can "
                "come from a DataLoader of its own",
            )
        if gradient_accumulation_steps < 1:
            raise SpecError(
                f"task: gradient_accumulation_steps is {gradient_accumulation_steps}, "
                "not a whole number above 0",
                field="task",
            )
        loader = loader_over(data, batch_size)
        given = data_of(loader)
        self._task.set_data(given.dataset, given.batch_size, given.collate, given.sampler)
        self._task.use_loader_settings(loader)
        made = BatchLoader(
            *(self._task, self._optimizer, loader, self._script, gradient_accumulation_steps)
        )
        self._loader = made if self._script else None
        return made

    @property
    def global_step(self) -> int:
        """Steps of the job before that of the present batch; several workers share a step.

        A loop that reads it may set learning rates itself.
        """
        self._task.sets_rates = True
        return self._task.place.step

    @property
    def epoch(self) -> int:
        """Epoch of the present batch, from 0. A loop that reads it may set learning rates, too."""
        self._task.sets_rates = True
        return self._task.place.epoch

    @property
    def starts_sequence(self) -> bool:
        """True if the present batch doesn't follow the previous one in the order of an epoch.

        A loop that carries a state from batch to batch resets it then.
        """
        return self._task.starts_sequence

    def step(self, loss: Tensor) -> None:
        """Make one optimizer step for a mean loss, a scalar with gradient.

        It replaces ``loss.backward()``, ``optimizer.step()``, and ``optimizer.zero_grad()``. Raises
        :class:`~vcasgd.errors.NonFiniteLoss` before the parameters change.
        """
        if not self._batch_pending:
            raise UserCodeError(
                "session.step was called twice for one batch, or without a batch",
                remedy="call it once for each batch of session.batches",
            )
        self._batch_pending = False
        check_rates(self._task, self._optimizer, self._rates)
        if self._script:
            self._script.submit(loss)
        else:
            self._step(loss)
        # The step may have set others.
        self._rates = learning_rates(self._optimizer)

    def _step(self, loss: Tensor) -> None:
        if self._precision is None:
            self._precision = StepPrecision(self._task, loss.device)
        backward(loss, self._steps + 1, self._share, self._precision)
        if self._ends_step:
            self._steps += 1
            closes = takes_closure(self._optimizer)
            closure = Closure(self._optimizer, float(loss), None) if closes else None
            update(*(self._task, self._optimizer, self._steps, self._precision), closure=closure)
            self._optimizer.zero_grad(set_to_none=True)

    def _checked(self, source: Iterator[Any]) -> Iterator[Any]:
        script, frame = self._script, sys._getframe(1)
        if script and not script.started and count_loops(frame, script.folder, repeated=True):
            raise UserCodeError(
                "session.batches is called in a loop, and its first call covers all epochs of a "
                "job, so what the loop does between them wouldn't be done",
                remedy="for a loop over epochs, use session.loader; or let one call of "
                "session.batches make all of them, with epochs=…",
            )
        for batch in source:
            self._batch_pending = True
            self._rates = learning_rates(self._optimizer)
            yield batch
            check_rates(self._task, self._optimizer, self._rates)
            if self._batch_pending:
                raise UserCodeError(
                    "a batch ended without session.step",
                    remedy="call it once for each batch of session.batches; to accumulate "
                    "gradients, pass gradient_accumulation_steps",
                )

    # -- training in this process --------------------------------------------------------------

    def _local_batches(self, epochs: int) -> Iterator[Any]:
        device = next(self._model.parameters()).device
        # Follows torch.manual_seed, and differs between calls for one epoch each.
        seed = int(torch.randint(2**32, ()))
        data = TrainingSet.of(self._task, seed)
        size = batch_size_of(self._task)
        # An order of many samples is computed in parts.
        count = 1 if data.order else -(-data.samples // (size * BATCHES_AT_ONCE))
        plan = EpochPlan(
            *(data.samples, max(count, 1), epochs, seed, data.blocks, data.order), batch_size=size
        )
        rates = Rates(self._task, self._optimizer)
        source = BatchSource(self._task, data.dataset, device, seed)
        for subtask in range(plan.total_subtasks):
            done = 0
            self._task.starts_sequence = subtask % plan.subtasks_per_epoch == 0
            interval, *following = (
                SampleRange(each, 0, plan.size(each))
                for each in range(subtask, min(subtask + 2, plan.total_subtasks))
            )
            for batch, count in source.batches(plan, interval, following):
                rates.follow(plan.place(plan.sample_of(subtask, done)))
                parts = self._weighted(list(parts_of(batch)))
                for number, (part, self._share) in enumerate(parts, 1):
                    self._ends_step = number == len(parts)
                    yield to_device(part, device)
                    self._task.starts_sequence = False
                done += count
            if self._task.has_evaluation and (subtask + 1) % plan.subtasks_per_epoch == 0:
                self._evaluate(plan.epoch_of(subtask) + 1, seed, device)
        source.close()

    def _weighted(self, parts: list[tuple[Any, float]]) -> list[tuple[Any, float]]:
        """Return the micro-batches of a step with their shares of its weight, without empty ones.

        ``parts`` has them with their shares of its samples.
        """
        if self._task.user_weight is None:
            return parts
        weighed = [(part, self._task.batch_weight(part) or 0.0) for part, _ in parts]
        total = sum(weight for _, weight in weighed)
        return [(part, weight / total) for part, weight in weighed if weight]

    def _evaluate(self, epoch: int, seed: int, device: torch.device) -> None:
        logged = collected.take()
        data = dataset_of(self._task, "validation", seed)
        self.metrics = evaluate(self._task, self._model, data, device)
        means = {name: mean for name, mean in self.metrics.items() if name != "count"}
        means |= {name: total / count for name, (total, count) in logged.items()}
        texts = (f"{name} {mean:.4f}" for name, mean in means.items())
        sys.stdout.write(f"epoch {epoch}: {', '.join(texts)}\n")


def _of_job(script: LoopInThread) -> Iterator[Any]:
    """Yield the batches of a worker's leases."""
    if script.started:
        raise UserCodeError(
            "the script began a second loop over its batches",
            remedy="the first session.batches covers all epochs of a job; for a loop over epochs, "
            "use session.loader",
        )
    script.start()
    while True:
        yield script.batch
