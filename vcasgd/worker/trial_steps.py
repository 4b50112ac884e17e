"""Local steps before any training, which show what the first batches of a job change; all are
undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.errors import NonFiniteLoss, UserCodeError, VcasgdError
from vcasgd.learning.bad_samples import BadSamples
from vcasgd.learning.base import as_real, buffers_of
from vcasgd.learning.batch_source import BatchSource, SampleRange
from vcasgd.learning.buffers import find_kinds, same_random_numbers, untouched
from vcasgd.learning.draws import seed_for
from vcasgd.learning.layout import TensorKind
from vcasgd.learning.local_batch import MIN_BATCH
from vcasgd.learning.local_model import LocalModel
from vcasgd.learning.optimizers import saved, set_mode
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.learning.training import (
    batch_size_of,
    gathered,
    loaded_once,
    micro_batches,
    set_seed,
    train,
)
from vcasgd.spec.job import JobSpec
from vcasgd.task.logged import collected
from vcasgd.task.task import Task, user_code

log = logging.getLogger(__name__)

#: Most numbers of directions that travel as those of one worker: each header has them.
MAX_DIRECTIONS = 1 << 15
#: Local steps that show which state of the task training changes.
STATE_STEPS = 3


@dataclass(frozen=True)
class BufferKinds:
    """Ways in which versions merge buffers.

    ``undivided`` ones depend on whole batches; ``shortened`` are directions of which versions have
    the mean.
    """

    kinds: dict[str, TensorKind]
    undivided: list[str] = field(default_factory=list)
    shortened: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrialSteps:
    """Steps of one process with samples of the job's first subtask.

    They raise errors of the user's code, and :class:`NonFiniteLoss`.
    """

    spec: JobSpec
    task: Task
    model: LocalModel
    dataset: Dataset[Any]
    plan: EpochPlan
    device: torch.device | str
    new_optimizer: Callable[[], Optimizer]

    def rehearse(self) -> None:
        """Make a step whose effect is undone, so that a mistake shows before the training."""
        attributes, module = dict(vars(self.task)), self.model.module
        try:
            with same_random_numbers(module), self.model.undone():
                with user_code("start_sequence"):
                    self.task.start_sequence(module)
                self._load_and_train(0, self._batch)
        except NonFiniteLoss as error:
            # Training says more, or leaves out the samples.
            log.debug("the rehearsed step: %s", error)
        finally:
            vars(self.task).update(attributes)
            collected.take()

    def change_state(self) -> None:
        """Make a few steps; the caller undoes them."""
        size = batch_size_of(self.task)
        self._load_and_train(0, min(STATE_STEPS * size, self.plan.size(0)))

    def change_by_part(self) -> None:
        """Make a step with fewer samples, as the job makes them; the caller undoes it."""
        size = batch_size_of(self.task)
        # Of an odd number, micro-batches have another size, too.
        part = self.plan.samples % size if self.spec.workers.max == 1 else size // 2 | 1
        if part:
            self._train_part(
                max(part, self.task.min_local_batch or MIN_BATCH),
                "let the code take batches of other sizes, or set min_local_batch to the size of a "
                "batch, so that one worker trains whole ones",
            )

    def change_by_last(self) -> None:
        """Make a step with as many samples as the last batch of an epoch; the caller undoes it."""
        size = batch_size_of(self.task)
        rest = self.plan.samples % size
        # A single sample joins the batch before it.
        if part := size + 1 if rest == 1 < size else rest:
            self._train_part(
                part,
                "let the code take batches of other sizes, or train on a Subset of as many samples "
                "as some whole batches have: a job trains all samples, also with drop_last",
            )

    def _train_part(self, samples: int, remedy: str) -> None:
        samples = min(samples, self.plan.size(0))
        try:
            self._load_and_train(0, samples)
        except UserCodeError as error:
            error.message += f", with a batch of {samples} samples"
            error.remedy = error.remedy or remedy
            raise

    def kinds_of(self, state: nn.Module, names: list[str]) -> BufferKinds:
        """Return how versions merge the buffers ``names`` of ``state``, all that a step changes."""
        buffers = buffers_of(state)
        whole = [name for name in names if not as_real(buffers[name]).is_floating_point()]
        usual = dict.fromkeys(whole, TensorKind.LATEST)
        if self.spec.workers.max == 1 or self._batch < 2 * MIN_BATCH:
            return BufferKinds(usual)
        try:
            with untouched(self.model.module):
                kinds, undivided = find_kinds(state, names, self._loaded_step(), self._batch)
        except (VcasgdError, KeyError) as error:
            # Or a tensor beside the model has disappeared.
            log.debug("buffers can't be observed: %r", error)
            return BufferKinds({})
        shortened = [name for name, kind in kinds.items() if kind is TensorKind.LATEST_FLOAT]
        if sum(buffers[name].numel() for name in shortened) <= MAX_DIRECTIONS:
            shortened = []
        unknown = {name: kind for name, kind in usual.items() if name in undivided}
        means = dict.fromkeys(shortened, TensorKind.STATISTIC)
        return BufferKinds({**unknown, **kinds, **means}, undivided, shortened)

    @property
    def _batch(self) -> int:
        return min(batch_size_of(self.task), self.plan.size(0))

    def _loaded_step(self) -> Callable[[int, int], None]:
        """Return a function that makes a step with the first batch, or with either half of it.

        Its samples are loaded once, so that data that is augmented is the same in all steps.
        """
        if self.spec.skips_bad_samples:
            return self._load_and_train
        size, task = self._batch, self.task
        indices: list[int] = self.plan.indices(0, 0, size).tolist()
        ranges = ((0, size), (0, size // 2), (size // 2, size))
        steps = [micro_batches(task, indices[start:stop]) for start, stop in ranges]
        collate = loaded_once(task, self.dataset, [indices, *chain.from_iterable(steps)])

        def step(start: int, stop: int) -> None:
            number = ranges.index((start, stop))
            parts = steps[number]
            first = 1 + sum(map(len, steps[:number]))
            loaded = collate()[first : first + len(parts)]
            self._train(gathered(iter(loaded), [list(map(len, parts))]))

        return step

    def _load_and_train(self, start: int, stop: int) -> None:
        skips = self.spec.skips_bad_samples
        source = BatchSource(self.task, self.dataset, self.device, self.spec.seed, skips=skips)
        try:
            self._train(source.batches(self.plan, SampleRange(0, start, stop), ()))
        finally:
            source.close()

    def _train(self, batches: Iterable[tuple[Any, int]]) -> None:
        skips = self.spec.skips_bad_samples
        set_seed(seed_for(self.spec.seed, 0, 0), self.device)
        optimizer = self.new_optimizer()
        is_kept = any(each is optimizer for each in vars(self.task).values())
        reset = saved(optimizer) if is_kept else None
        set_mode(optimizer, training=True)
        try:
            train(
                *(self.task, self.model.module, optimizer, batches, self.device),
                bad=BadSamples(self.task, self.dataset, self.device) if skips else None,
            )
        finally:
            set_mode(optimizer, training=False)
            if reset is not None:
                reset()
