"""Facts of a job that its first worker finds out before any training, and that others follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.errors import DataError, MachineDiffers, SpecError
from vcasgd.learning.batch_probe import division_of, normalized, probed
from vcasgd.learning.batch_weights import BatchWeights, CountedLabels, declared_weight, measure_of
from vcasgd.learning.encodings import Float32
from vcasgd.learning.gradient_hooks import are_hooked
from vcasgd.learning.layout import BESIDE, Layout, TensorKind
from vcasgd.learning.length import plan_for
from vcasgd.learning.local_batch import Division, most_workers
from vcasgd.learning.local_model import LocalModel, check_same
from vcasgd.learning.mean_gradients import needs_mean_gradients
from vcasgd.learning.optimizers import trained_by
from vcasgd.learning.rules import make_rule
from vcasgd.learning.sample_content import SampleContent
from vcasgd.learning.shards import shards_for
from vcasgd.learning.streams import Stream
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.learning.training import batch_size_of, batches_of, parts_of, sound_samples
from vcasgd.learning.training_set import TrainingSet, dataset_of, length_of
from vcasgd.schemas.base import MAX_NAME_LENGTH
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.task.task import Task
from vcasgd.worker.adapter import adapter_of
from vcasgd.worker.approximations import approximations
from vcasgd.worker.trial_steps import TrialSteps

#: Most numbers that keep double precision: each version describes them in its metadata.
MAX_EXACT = 1 << 16


class Findings:
    """Facts of a job that only the user's code and data know.

    They are this machine's own until :meth:`follow`, and those that the first worker recorded from
    then on.
    """

    def __init__(
        self,
        spec: JobSpec,
        task: Task,
        model: LocalModel,
        device: torch.device | str,
        new_optimizer: Callable[[], Optimizer],
    ) -> None:
        self._spec, self._task, self._model, self._device = spec, task, model, device
        self._new_optimizer = new_optimizer
        self._rounds = make_rule(spec.update).rounds
        self._plan: EpochPlan | None = None
        #: Buffers that depend on whole batches.
        self._undivided: list[str] = []
        #: Directions of which versions have the mean.
        self._shortened: list[str] = []
        self._recorded: ModelFacts | None = None
        self._validation_samples: int | None = None
        self.use_layout()

    def use_layout(self, *, gradients: bool = False, doubles: tuple[str, ...] = ()) -> None:
        """Lay the vectors out for the present state of the model."""
        names = self._model.doubles()
        rounded = names[0] if names and not doubles else ""
        self.layout = self._model.layout = replace(
            self._model.layout, gradients=gradients, doubles=doubles, rounded=rounded
        )
        self.layout_digest = self.layout.digest()

    @property
    def codec(self) -> str:
        """The encoding of updates, which is known after :meth:`follow` if the job names none."""
        return (self._recorded.update(self._spec) if self._recorded else self._spec.update).codec

    @property
    def has_sparse_gradients(self) -> bool:
        """True if a layer has sparse gradients, which processes can't add."""
        return any(getattr(each, "sparse", False) is True for each in self._model.module.modules())

    # -- data --------------------------------------------------------------------------------------

    @cached_property
    def data(self) -> TrainingSet:
        return TrainingSet.of_job(self._task, self._spec, batch_size_of(self._task))

    @cached_property
    def validation_set(self) -> Dataset[Any]:
        return dataset_of(self._task, "validation", self._spec.seed)

    @cached_property
    def _content(self) -> SampleContent:
        dataset = self.data.dataset
        return SampleContent.of(self._task, dataset, length_of(dataset, "train"))

    def count_samples(self, on_progress: Callable[[], None]) -> None:
        """Count the samples of data that can only be iterated over.

        Calls ``on_progress`` now and then. Raises errors of the user's code.
        """
        stream = self.data.dataset
        if isinstance(stream, Stream):
            stream.count(on_progress)

    @property
    def plan(self) -> EpochPlan:
        """The division of the job into subtasks: the recorded one after :meth:`follow`.

        Raises :class:`DataError` if the data set is empty or has too few samples.
        """
        if self._plan is None:
            samples = self.data.samples  # A sampler may choose the batch size.
            self._plan = self._plan_with(samples, batch_size_of(self._task), None)
        return self._plan

    def _plan_with(self, samples: int, batch_size: int, subtasks: int | None) -> EpochPlan:
        try:
            return plan_for(
                self._spec,
                samples,
                batch_size,
                subtasks=subtasks,
                blocks=self.data.blocks,
                order=self.data.order,
                floats=self.layout.state_floats,
            )
        except SpecError as error:
            # Another machine may have more of the data.
            raise DataError(error.message, remedy=error.remedy, **error.details) from error

    # -- batches and their parts -------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """The job's batch: the recorded one after :meth:`follow`."""
        recorded = self._recorded.batch_size if self._recorded else None
        return recorded or batch_size_of(self._task)

    @cached_property
    def _own_division(self) -> Division:
        division, batch = self._divided_loss, batch_size_of(self._task)
        if not self._undivided or self._task.min_local_batch is not None:
            return division
        names = ", ".join(name.removeprefix(BESIDE) for name in self._undivided)
        return Division(batch, f"its batches change {names} as parts of them don't")

    @property
    def _averaged(self) -> list[str]:
        """Buffers of whole batches, and directions, that workers share nevertheless."""
        spec, divides = self._spec, self._task.min_local_batch is not None
        shared = spec.batch == "worker" or not self._rounds or divides
        names = [*self._shortened, *(self._undivided if shared else ())]
        return [name.removeprefix(BESIDE) for name in names]

    @property
    def _shares_batches(self) -> bool:
        """True if a step of several workers has a part of a batch of each."""
        shared = self._rounds and self._spec.batch != "worker"
        return shared and most_workers(self.batch_size, self.division.least) > 1

    @property
    def _mixes_batches(self) -> bool:
        """True if a step of several workers has parts of several batches of a sampler."""
        return self._shares_batches and self.plan.ends(0, 0, self.plan.size(0)) is not None

    @property
    def trains_alike(self) -> bool:
        """True if workers share steps, and successive samples of a worker may be alike."""
        order = self.plan.order
        return self._shares_batches and order is not None and not order.is_random

    @property
    def _divided_loss(self) -> Division:
        """The division without a look at buffers."""
        task, module, spec = self._task, self._model.module, self._spec
        alone = not self._rounds or spec.batch == "worker" or spec.workers.max == 1
        if alone and spec.workers.gpus == 1:
            return division_of(task, module)
        # Accumulated micro-batches have losses of their own.
        size = -(-batch_size_of(task) // batch_size_of(task, "gradient_accumulation_steps"))
        found = probed(
            *(task, module, self.data.dataset, self._first_samples(size), self._device),
            state=self._model.whole,
            optimizer=self._new_optimizer() if task.makes_steps else None,
        )
        # Ranks apply no ``loss_factor``, and a loop divides the losses of micro-batches itself.
        single = size == batch_size_of(task) and task.batches_per_step == 1
        if found.sums and single and spec.workers.gpus == 1:
            return replace(division_of(task, module), sums=True)
        return found

    def _first_samples(self, size: int) -> list[int]:
        """Return the samples of the job's first batch, without those that the job skips."""
        indices: list[int] = self.plan.indices(0, 0, min(self.plan.size(0), size)).tolist()
        if not self._spec.skips_bad_samples:
            return indices
        return sound_samples(self._task, self.data.dataset, indices) or indices

    @property
    def division(self) -> Division:
        """Least part of a batch: the recorded one after :meth:`follow`."""
        facts = self._recorded
        if facts is None or facts.min_local_batch is None:
            return self._own_division
        labels = CountedLabels.from_json(facts.batch_labels) if facts.batch_labels else None
        least, why = facts.min_local_batch, facts.min_local_batch_why
        return Division(least, why, labels, sums=facts.sums_losses)

    @cached_property
    def _own_weight(self) -> float | None:
        """Weight of a sample in the first batch; None if batches count by their samples."""
        # Gradients of a worker's ranks are added by samples.
        weighs = self.division.labels or type(self._task).batch_weight is not Task.batch_weight
        if not weighs or self._spec.workers.gpus != 1:
            return None
        indices = self._first_samples(batch_size_of(self._task))
        groups = [(indices, len(indices))]
        batch, count = next(batches_of(self._task, self.data.dataset, groups))
        labels, parts = self.division.labels, [part for part, _ in parts_of(batch)]
        weights = [labels.count(each) if labels else declared_weight(self._task, each)
                   for each in parts]  # fmt: skip
        known = [weight for weight in weights if weight is not None]
        return sum(known) / count or 1.0 if known else None

    @cached_property
    def weights(self) -> BatchWeights | None:
        """Weights of batches; None if they count by their samples."""
        facts = self._recorded
        recorded = facts is not None and facts.batch_size is not None
        per_sample = facts.batch_weight if facts and recorded else self._own_weight
        if per_sample is None:
            return None
        return BatchWeights(measure_of(self._task, self.division.labels), per_sample)

    # -- of the first worker -----------------------------------------------------------------------

    def facts(self, nodes: int, *, verified: bool, mapped: bool) -> ModelFacts:
        """Return the facts of a job that starts on ``nodes`` store nodes.

        ``verified``: volunteers work for it, whose updates can be repeated only in one piece.
        ``mapped``: no process has the whole vector of the model.
        """
        self._find_state()
        if self._task.drops_last and self._spec.workers.gpus == 1:
            with self._model.undone():
                self.trial.change_by_last()
        self._model.find_buffers(self._find_buffers)
        self.use_layout()
        adapter = adapter_of(self._model.module)
        needed = False
        if shards_for(nodes, self.layout.floats) == 1:
            needed = needs_mean_gradients(
                *(self._spec, self._task, self.layout.state_floats, self._new_optimizer),
                alike=self.trains_alike,
                hooked=are_hooked(self._model.parameters),
            )
            self.use_layout(gradients=needed, doubles=() if verified else self._exact_doubles())
        # Mean gradients have to be in one piece, too.
        in_pieces = not verified and not needed
        floats = self.layout.floats
        takes_turns = self._rounds and self._spec.push_every is None
        in_turn = in_pieces and (takes_turns or mapped)
        return ModelFacts(
            samples=self.plan.samples,
            validation_samples=length_of(self.validation_set, "validation"),
            layout=self.layout.to_json(),
            order_digest=self.plan.order_digest(),
            shards=shards_for(nodes, floats, in_turn=in_turn),
            nodes=shards_for(nodes, floats),
            batch_size=batch_size_of(self._task),
            batch_weight=self._own_weight,
            min_local_batch=self.division.least,
            batch_labels=labels.to_json() if (labels := self.division.labels) else "",
            min_local_batch_why=self.division.why[:MAX_NAME_LENGTH],
            sums_losses=self.division.sums,
            notes=approximations(
                *(self._spec, self._task, self.layout, self._new_optimizer(), self._averaged),
                self.data.dataset,
                self._model.module,
                mixes=self._mixes_batches,
                alike=self.trains_alike,
                in_turn=self.division.in_turn,
                normalized=normalized(self._model.module) if self._shares_batches else None,
            ),
            subtasks_per_epoch=self.plan.subtasks_per_epoch,
            adapter=adapter.to_json() if adapter else "",
            content=self._content.to_json(),
            shard_lengths=self._shard_lengths(),
        )

    @property
    def trial(self) -> TrialSteps:
        """Steps before any training."""
        return TrialSteps(
            *(self._spec, self._task, self._model, self.data.dataset, self.plan, self._device),
            self._new_optimizer,
        )

    def _find_buffers(self, state: nn.Module, names: list[str]) -> dict[str, TensorKind]:
        """Find out how versions merge these buffers, before any training."""
        if self._spec.workers.gpus != 1:
            return {}
        found = self.trial.kinds_of(state, names)
        self._undivided, self._shortened = found.undivided, found.shortened
        return found.kinds

    def _find_state(self) -> None:
        """Find out what travels with the model, before any training."""
        if self._spec.workers.gpus != 1:
            return
        self._model.find_state(
            self._new_optimizer,
            lambda: self.trial.change_state(),
            lambda: self.trial.change_by_part(),
        )
        self._check_optimizer()
        # It depends on the size of the model.
        self._plan = None
        self.use_layout()

    def _check_optimizer(self) -> None:
        """Raise :class:`SpecError` if an optimizer trains what isn't in updates."""
        whole = self._model.whole
        known = {id(each) for each in (*whole.parameters(), *whole.buffers())}
        trained = (each for each in trained_by(self._new_optimizer()) if each.requires_grad)
        if others := [each for each in trained if id(each) not in known]:
            raise SpecError(
                f"task: the optimizer trains {len(others)} tensors that aren't in the model, nor "
                "in variables of the script or attributes of the task",
                remedy="make it with the parameters of the model, which can be a ModuleDict of "
                "several",
                field="task",
            )

    def _exact_doubles(self) -> tuple[str, ...]:
        """Return the names of the tensors that keep their double precision in versions."""
        update, names = self._spec.update, self._model.doubles()
        sizes = (entry.size for entry in self.layout.entries if entry.name in names)
        exact = self._rounds and update.codec in ("auto", Float32.name)
        return names if exact and self._spec.workers.gpus == 1 and sum(sizes) <= MAX_EXACT else ()

    def _follow_layout(self, first: Layout) -> None:
        """Use the layout of the first worker, as far as this machine's model has it."""
        self._model.follow_state(first)
        self.use_layout(gradients=first.gradients, doubles=first.doubles)

    # -- of a further worker -----------------------------------------------------------------------

    def check_against(self, facts: ModelFacts) -> None:
        """Raise :class:`MachineDiffers` if the model or the data differs from the first worker's.

        From now on :attr:`plan` is the one that the first worker recorded.
        """
        first = Layout.from_json(facts.layout)
        self._follow_layout(first)
        check_same(first, self.layout)
        self._use_shards(facts)
        self._check_length(self.data.samples, "train", facts.samples)
        if self.plan.order_digest() != facts.order_digest:
            raise _differs('the order of dataset("train") is another one')
        difference = self._content.difference(SampleContent.from_json(facts.content))
        if difference is not None:
            raise _differs(f'dataset("train"): {difference}')
        self._validation_samples = facts.validation_samples
        self.follow(facts)

    def check_validation(self) -> None:
        """Raise :class:`MachineDiffers` if the validation set has another length than the first
        worker's."""
        if self._validation_samples is not None:
            samples = length_of(self.validation_set, "validation")
            self._check_length(samples, "validation", self._validation_samples)

    def follow(self, facts: ModelFacts) -> None:
        """Follow what the first worker found out."""
        self._follow_layout(Layout.from_json(facts.layout))
        self._use_shards(facts)
        # The task's batch size may depend on the machine.
        batch_size, subtasks = facts.batch_size or 1, facts.subtasks_per_epoch
        self._plan = self._plan_with(facts.samples, batch_size, subtasks)
        self._recorded = facts

    def _check_length(self, samples: int, split: str, recorded: int) -> None:
        if samples != recorded:
            raise _differs(f'dataset("{split}") has {samples} samples instead of {recorded}')

    def _use_shards(self, facts: ModelFacts) -> None:
        stream = self.data.dataset
        if isinstance(stream, Stream):
            if stream.shards != len(facts.shard_lengths):
                there = len(facts.shard_lengths)
                raise _differs(f'dataset("train") has {stream.shards} shards instead of {there}')
            stream.use(facts.shard_lengths)

    def _shard_lengths(self) -> tuple[int, ...]:
        stream = self.data.dataset
        return stream.lengths if isinstance(stream, Stream) else ()


def _differs(what: str) -> MachineDiffers:
    return MachineDiffers(
        f"task: {what}, unlike on the first machine",
        remedy="make Task.dataset independent of the machine, for example by sorting file names",
        field="task",
    )
