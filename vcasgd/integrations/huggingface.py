"""``TrainerTask``: train what a ``Trainer`` of Hugging Face's transformers trains.

The loop is the worker's. Model, data, collator, loss, optimizer, schedule, and metrics are the
trainer's, through its own methods, so those that a subclass overrides apply here as well.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from vcasgd.errors import LoopEnded, SpecError, UserCodeError
from vcasgd.learning.gradient_hooks import repeat_with_mean
from vcasgd.learning.optimizers import saved
from vcasgd.learning.rates import set_options
from vcasgd.learning.training_set import first_place
from vcasgd.session.schedules import Options, Replay, options_of
from vcasgd.spec.job import JobSpec
from vcasgd.task.loop_code import changes_of_hook
from vcasgd.task.place import Place
from vcasgd.task.task import Task, source_of, variables_of

#: Arguments of a trainer that this task can't follow, and why.
_REFUSED = {
    "deepspeed": "it shards a model over processes that wait for each other",
    "fsdp": 'leave it out, and pass parallel="fsdp" to TrainerTask',
    "torch_compile": "the trainer compiles the model only in its own loop",
    "neftune_noise_alpha": "the trainer adds the noise only in its own loop",
}


#: Methods of a trainer whose work is the job's.
_NOT_CALLED = (
    "train",
    "training_step",
    "get_batch_samples",
    "create_optimizer_and_scheduler",
    "get_train_dataloader",
    "_inner_training_loop",
)


class TrainerTask(Task):
    """Task made of the trainer that ``make_trainer`` returns.

    For example, with ``task: train:task`` in the job file::

        def make_trainer(learning_rate=2e-5):
            ...
            return Trainer(model=model, args=training_args, train_dataset=…, eval_dataset=…)

        task = TrainerTask(make_trainer)

    ``parallel`` and ``fsdp_blocks`` are those of :class:`~vcasgd.task.task.Task`. The job's
    ``args`` are those of ``make_trainer``. The job file sets the length of the training
    and the interval of evaluations. ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps`` is the job's batch, which all workers share. Methods raise
    :class:`~vcasgd.errors.SpecError` for a trainer whose settings can't be followed.
    """

    #: A trainer has a state of its own, such as an optimizer that was passed to it.
    repeatable = False

    def __init__(
        self,
        make_trainer: Callable[..., Trainer],
        *,
        parallel: str = "ddp",
        fsdp_blocks: Sequence[type[nn.Module] | str] = (),
    ) -> None:
        self._make_trainer = make_trainer
        self.parallel, self.fsdp_blocks = parallel, fsdp_blocks
        self._made: Trainer | None = None
        self._models: list[nn.Module] = []
        self._spec: JobSpec | None = None
        self._callbacks: StepCallbacks | None = None
        #: Options that the trainer's scheduler sets; None before the first optimizer.
        self._replay: Replay | None = None
        self._given_optimizer: Optimizer | None = None
        self._reset: Callable[[], None] | None = None

    def follow_job(self, spec: JobSpec) -> None:
        self._spec = spec

    def __call__(self, **args: Any) -> TrainerTask:
        """Return the same task with a job's ``args``."""
        made = partial(self._make_trainer, **args)
        return type(self)(made, parallel=self.parallel, fsdp_blocks=self.fsdp_blocks)

    @property
    def trainer(self) -> Trainer:
        if self._made is None:
            self._made = trainer = _made_by(self._make_trainer)
            _check(trainer)
            # Evaluations beside the training leave the type of the model alone.
            trainer.is_in_train = True
            self._given_optimizer = trainer.optimizer
            steps = trainer.args.gradient_accumulation_steps
            self.batch_size = trainer.args.train_batch_size * steps
            self.gradient_accumulation_steps = steps
            self.mixed_precision = (
                "fp16" if trainer.args.fp16 else "bf16" if trainer.args.bf16 else None
            )
            self.evaluation_batch_size = trainer.args.eval_batch_size
            self.clip_norm = trainer.args.max_grad_norm or None
            self.loader_workers = trainer.args.dataloader_num_workers
            self.prefetch_factor = trainer.args.dataloader_prefetch_factor or self.prefetch_factor
            self.pin_memory = trainer.args.dataloader_pin_memory
        return self._made

    # -- model and data ------------------------------------------------------------------------

    def model(self) -> nn.Module:
        """Return the trainer's model, in training mode."""
        # Later calls need a model with its initial values.
        trainer = self._make_trainer() if self._models else self.trainer
        model: nn.Module = trainer.model.train()
        if trainer.args.gradient_checkpointing:
            # Newer versions warn of the old name.
            enable = getattr(model, "activation_checkpointing_enable", None)
            enable = enable or cast("Any", model).gradient_checkpointing_enable
            enable(trainer.args.gradient_checkpointing_kwargs)
        self._models.append(model)
        return model

    def base_buffers(self, model: nn.Module) -> Iterable[str]:
        """Return all persistent buffers of a quantized model, which are its weights."""
        if not getattr(model, "is_quantized", False):
            return ()
        return model.state_dict().keys() & dict(model.named_buffers()).keys()

    def dataset(self, split: str) -> Dataset[Any]:
        name = "train_dataset" if split == "train" else "eval_dataset"
        data = getattr(self.trainer, name)
        if data is None or isinstance(data, dict):
            raise _refused(f"{name} is {type(data).__name__}", "a job needs one data set")
        # The collator drops the columns of a stream.
        if hasattr(data, "column_names") and not isinstance(data, IterableDataset):
            data = self.trainer._remove_unused_columns(data)
        return cast("Dataset[Any]", data)

    def sampler(self, dataset: Dataset[Any]) -> Any:
        return self.trainer._get_train_sampler(dataset)

    def collate(self, samples: list[Any]) -> Any:
        """Combine samples with the trainer's collator, without columns that the model lacks."""
        trainer = self.trainer
        return trainer._get_collator_with_removed_columns(trainer.data_collator)(samples)

    # -- training ------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return ``compute_loss`` of the trainer, under its mixed precision."""
        trainer = self.trainer
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            # The mean over the labels of this batch; it counts by its weight.
            count = trainer._get_num_items_in_batch([batch], "cpu")
            more = {} if count is None else {"num_items_in_batch": count}
            loss: Tensor = trainer.compute_loss(model, inputs, **more)
        return loss

    def batch_weight(self, batch: Any) -> Tensor | None:
        """Return the trainer's ``num_items_in_batch``; None if its loss doesn't use that."""
        count = self.trainer._get_num_items_in_batch([batch], "cpu")
        return count if isinstance(count, Tensor) else None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = self._new_optimizer(next(iter(parameters)))
        if self._replay is None:
            self._follow_scheduler()
        self.callbacks.use(optimizer)
        self.hooks = self.callbacks.names
        return optimizer

    def _new_optimizer(self, first: nn.Parameter) -> Optimizer:
        trainer = self.trainer
        if self._given_optimizer is not None:
            # It was passed to the trainer, which can't make another one.
            given = self._given_optimizer
            if self._reset is None:
                self._reset = saved(given)
            self._reset()
            return given
        model = next(each for each in self._models if any(first is p for p in each.parameters()))
        before = trainer.model
        trainer.model, trainer.optimizer = model, None
        try:
            # As the trainer does: without arguments, and whatever is returned.
            trainer.create_optimizer()
        finally:
            trainer.model = before
        return cast("Optimizer", trainer.optimizer)

    def step_options(self, place: Place) -> Options | None:
        """Call the callbacks around a local step; return the options that the scheduler sets, and
        callbacks after it.

        Raises :class:`~vcasgd.errors.LoopEnded` if a callback stops the training.
        """
        options = self._replay.at(place.step) if self._replay else None
        return self.callbacks.begin_step(place, options)

    @property
    def callbacks(self) -> StepCallbacks:
        if self._callbacks is None:
            self._callbacks = StepCallbacks(self.trainer, self._length())
        return self._callbacks

    def _length(self) -> Place:
        """Return the first place of the job, or without one of the trainer's own training."""
        if (spec := self._spec) is None:
            args, own = self.trainer.args, {"name": "trainer", "task": "trainer:task"}
            epochs = math.ceil(args.num_train_epochs)
            length = {"max_steps": args.max_steps} if args.max_steps > 0 else {"epochs": epochs}
            spec = JobSpec.parse({**own, **length})
        return first_place(self, spec, self.batch_size)

    def _follow_scheduler(self) -> None:
        trainer = self.trainer
        if trainer.lr_scheduler is None:
            trainer.create_scheduler(num_training_steps=self._length().steps)
        scheduler: Any = trainer.lr_scheduler
        if isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR":
            raise _refused(
                f"the scheduler {type(scheduler).__name__}",
                "the learning rate must be a function of the step, as those of "
                "transformers.get_scheduler are",
            )
        self._replay = Replay([scheduler.optimizer], [scheduler], lambda _: scheduler.step())

    def variables(self) -> dict[str, Callable[[], Any]]:
        """Return the callbacks, which may have averages of the model, and attributes of the trainer
        that the library doesn't set."""
        trainer: Any = self.trainer
        own = vars(trainer).keys() - _set_by_library(type(trainer))
        attributes = {name: partial(getitem, vars(trainer), name) for name in sorted(own)}
        return attributes | variables_of(trainer.callback_handler.callbacks)

    def source(self) -> str:
        handler: Any = self.trainer.callback_handler
        return source_of([self.trainer, *handler.callbacks])

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate_set(self, model: nn.Module, batches: Iterable[Any]) -> Mapping[str, float]:
        """Return what the trainer's ``evaluate`` returns, without the prefix of its names."""
        trainer: Any = self.trainer
        if model is not trainer.model:
            # Processes that hold parts of a model build it again after the loss of one.
            trainer.model = trainer.model_wrapped = model
        data = _EvaluationBatches(self.dataset("validation"), self.evaluation_batch_size, batches)
        # The worker has changed the optimizer to evaluation, if it has such a mode.
        optimizer, trainer.optimizer = trainer.optimizer, None
        trainer.get_eval_dataloader = lambda *_: data
        try:
            found = trainer.evaluate(self.dataset("validation"))
        finally:
            del trainer.get_eval_dataloader
            trainer.optimizer = optimizer
        named = {name.removeprefix("eval_"): value for name, value in found.items()}
        return {name: float(value) for name, value in named.items() if name not in _OF_THE_RUN}

    def end_after(self, metrics: Sequence[Mapping[str, float]]) -> str | None:
        return self.callbacks.stops_after(metrics)


#: Names of values in a trainer's evaluation that are no metrics.
_OF_THE_RUN = (
    *("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch"),
)


class _EvaluationBatches:
    """The batches that a worker evaluates, with what a trainer asks of a loader."""

    def __init__(self, dataset: Dataset[Any], batch_size: int, batches: Iterable[Any]) -> None:
        self.dataset, self.batch_size, self._batches = dataset, batch_size, batches

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class StepCallbacks:
    """Callbacks of a trainer in a job of the length of ``first``, with the counters of its steps.

    What the job has itself is left out: the flow of evaluations and checkpoints, progress bars, and
    reports. Its evaluations drive early stopping.
    """

    def __init__(self, trainer: Trainer, first: Place) -> None:
        self._trainer, self._place = trainer, Place(0.0)
        handler: Any = trainer.callback_handler
        self._stopping = [
            each for each in handler.callbacks if isinstance(each, EarlyStoppingCallback)
        ]
        handler.callbacks = [each for each in handler.callbacks if not _is_jobs_own(each)]
        self._started = self._in_step = False
        self._hooks: list[Any] = []
        trainer.state.max_steps = first.steps
        trainer.state.num_train_epochs = -(-first.steps // first.epoch_steps)

    @property
    def names(self) -> list[str]:
        handler: Any = self._trainer.callback_handler
        return [type(each).__name__ for each in handler.callbacks]

    def use(self, optimizer: Optimizer) -> None:
        """Call the callbacks around the steps of a new optimizer."""
        handler: Any = self._trainer.callback_handler
        handler.optimizer, handler.lr_scheduler = optimizer, self._trainer.lr_scheduler
        handler.model = self._trainer.model
        for hook in self._hooks:
            # A trainer can return the same optimizer again.
            hook.remove()

        def before(*_: Any) -> None:
            self._call("on_pre_optimizer_step")

        if any(map(_changes_gradients, handler.callbacks)):
            repeat_with_mean(before)
        self._hooks = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(lambda *_: self._call("on_optimizer_step")),
        ]

    def begin_step(self, place: Place, options: Options | None) -> Options | None:
        """End the step before, and begin that at a place of the job with the scheduler's options.

        Returns them as callbacks leave them.
        """
        optimizer: Any = cast("Any", self._trainer.callback_handler).optimizer
        for group, scheduled in zip(optimizer.param_groups, options or (), strict=False):
            set_options(group, scheduled)
        self._call_around(place)
        return options and [
            {name: left[name] for name in scheduled}
            # A group that a callback has added is the next step's error.
            for scheduled, left in zip(options, options_of([optimizer]), strict=False)
        ]

    def _call_around(self, place: Place) -> None:
        before, ends_epoch = self._place, place.epoch > self._place.epoch
        if self._in_step:
            self._count(before, before.step + 1, before.batch + 1)
            self._call("on_step_end")
            if ends_epoch:
                self._call("on_epoch_end")
        self._place, first, self._started = place, not self._started, True
        self._count(place, place.step, place.batch)
        if first:
            self._call("on_train_begin")
        if first or (self._in_step and ends_epoch):
            self._call("on_epoch_begin")
        self._call("on_step_begin")
        self._in_step = True

    def _count(self, place: Place, step: int, batch: int) -> None:
        state = self._trainer.state
        state.global_step, state.epoch = step, place.epoch + batch / place.epoch_steps

    def _call(self, event: str) -> None:
        trainer = self._trainer
        handler: Any = trainer.callback_handler
        control = getattr(handler, event)(trainer.args, trainer.state, trainer.control)
        if control.should_training_stop:
            raise LoopEnded(f"a callback stopped the training in epoch {self._place.epoch + 1}")
        if control.should_epoch_stop:
            raise UserCodeError(
                "a callback set should_epoch_stop, but each sample of an epoch counts",
                remedy="set should_training_stop, or use a smaller data set",
            )
        # The job decides about these.
        control.should_save = control.should_evaluate = control.should_log = False

    def stops_after(self, metrics: Sequence[Mapping[str, float]]) -> str | None:
        """Return why early stopping ends the training after evaluations with these metrics."""
        args = self._trainer.args
        name = (args.metric_for_best_model or "loss").removeprefix("eval_")
        for each in map(copy.deepcopy, self._stopping):
            state, control = TrainerState(), TrainerControl()
            checked = copy.copy(args)
            checked.metric_for_best_model = name
            for value in (values[name] for values in metrics if name in values):
                each.on_evaluate(checked, state, control, {f"eval_{name}": value})
                better = max if args.greater_is_better else min
                # A patience of 0 ends at the first evaluation, which none comes before.
                best = value if state.best_metric is None else state.best_metric
                state.best_metric = better(best, value)
                if control.should_training_stop:
                    return f"EarlyStoppingCallback: {name} was not improved after {best:.4f}"
        return None


def _changes_gradients(callback: TrainerCallback) -> bool:
    """Return True if a callback changes gradients before a step, by nothing else than them."""
    return changes_of_hook(inspect.unwrap(type(callback).on_pre_optimizer_step)) is not None


def _is_jobs_own(callback: TrainerCallback) -> bool:
    own = (DefaultFlowCallback, ProgressCallback, PrinterCallback, EarlyStoppingCallback)
    return isinstance(callback, own) or type(callback).__module__.startswith(
        "transformers.integrations"
    )


def _set_by_library(kind: type[Trainer]) -> set[str]:
    """Return the names that constructors of transformers and TRL use, their attributes among them.

    The function for the loss is the user's.
    """
    found: set[str] = {"callback_handler", "optimizer", "lr_scheduler"}
    for each in kind.__mro__:
        if _is_library(each) and "__init__" in vars(each):
            found.update(vars(each)["__init__"].__code__.co_names)
    return found - {"compute_loss_func"}


def _is_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("transformers", "trl")


def _made_by(make_trainer: Callable[..., Trainer]) -> Trainer:
    try:
        return make_trainer()
    except ValueError as error:
        if "fsdp" not in str(error):
            raise
        raise _refused("fsdp", _REFUSED["fsdp"]) from error


def _check(trainer: Trainer) -> None:
    for name in _NOT_CALLED:
        owner = next(each for each in type(trainer).__mro__ if name in vars(each))
        if not _is_library(owner):
            raise _refused(
                f"a {name} of its own",
                "the worker makes the steps, from compute_loss, create_optimizer, and "
                "create_scheduler",
            )
    if not _is_library(next(e for e in type(trainer).__mro__ if "get_eval_dataloader" in vars(e))):
        raise _refused("a get_eval_dataloader of its own", "pass what it loads as eval_dataset")
    for name, why in _REFUSED.items():
        if getattr(trainer.args, name, None):
            raise _refused(name, why)
    if trainer.is_model_parallel:
        raise _refused("a model on several GPUs", "a worker trains on one")


def _refused(what: str, why: str) -> SpecError:
    return SpecError(f"task: the trainer can't be used with {what}: {why}", field="task")
