"""``TrainerTask``: train what a ``Trainer`` of Hugging Face's transformers trains.

The loop is the worker's. Model, data, collator, loss, optimizer, schedule, and metrics are the
trainer's, through its own methods, so those that a subclass overrides apply here as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, IterableDataset
from transformers import EvalPrediction, Trainer

from vcasgd.errors import SpecError
from vcasgd.task.task import Task

#: Arguments of a trainer that this task can't follow, and why.
_REFUSED = {
    "deepspeed": "it shards a model over processes that wait for each other",
    "fsdp": "it shards a model over processes that wait for each other",
    "torch_compile": "the trainer compiles the model only in its own loop",
    "neftune_noise_alpha": "the trainer adds the noise only in its own loop",
}


class TrainerTask(Task):
    """Task made of the trainer that ``make_trainer`` returns.

    For example, with ``task: train:task`` in the job file::

        def make_trainer(learning_rate=2e-5):
            ...
            return Trainer(model=model, args=training_args, train_dataset=…, eval_dataset=…)

        task = TrainerTask(make_trainer)

    The job's ``args`` are those of ``make_trainer``. The job file sets the length of the training
    and the interval of evaluations. ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps`` is the job's batch, which all workers share. Methods raise
    :class:`~vcasgd.errors.SpecError` for a trainer whose settings can't be followed.
    """

    #: A trainer has a state of its own, such as an optimizer that was passed to it.
    repeatable = False

    def __init__(self, make_trainer: Callable[..., Trainer]) -> None:
        self._make_trainer = make_trainer
        self._made: Trainer | None = None
        self._models: list[nn.Module] = []
        self._factor: Callable[[int], float] | None = None
        self._optimizer_state: dict[str, Any] | None = None

    def __call__(self, **args: Any) -> TrainerTask:
        """Return the same task with a job's ``args``."""
        return type(self)(partial(self._make_trainer, **args))

    @property
    def trainer(self) -> Trainer:
        """The trainer; made at the first use."""
        if self._made is None:
            self._made = trainer = self._make_trainer()
            _check(trainer)
            steps = trainer.args.gradient_accumulation_steps
            self.batch_size = trainer.args.train_batch_size * steps
            self.gradient_accumulation_steps = steps
            # The trainer's own context computes in bf16; fp16 also needs a scaler.
            self.mixed_precision = "fp16" if trainer.args.fp16 else None
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
        """Return ``train_dataset`` or ``eval_dataset``."""
        name = "train_dataset" if split == "train" else "eval_dataset"
        data = getattr(self.trainer, name)
        if data is None or isinstance(data, dict):
            raise _refused(f"{name} is {type(data).__name__}", "a job needs one data set")
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise _refused(
                f"{name} is iterable", "each sample needs an index, so that it counts exactly once"
            )
        if hasattr(data, "column_names"):
            data = self.trainer._remove_unused_columns(data)
        return cast("Dataset[Any]", data)

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
        """Return a new optimizer of the trainer, with its groups of parameters."""
        trainer, first = self.trainer, next(iter(parameters))
        if trainer.optimizer is not None:
            # It was passed to the trainer, which can't make another one.
            given: Optimizer = trainer.optimizer
            if self._optimizer_state is None:
                self._optimizer_state = copy.deepcopy(given.state_dict())
            given.load_state_dict(copy.deepcopy(self._optimizer_state))
            return given
        model = next(each for each in self._models if any(first is p for p in each.parameters()))
        made: Optimizer = trainer.create_optimizer(model)
        trainer.optimizer = None
        return made

    def schedule(self, progress: float) -> float:
        """Return the factor of the trainer's scheduler at this share of its steps."""
        if self._factor is None:
            self._factor = _factor(self.trainer)
        return float(self._factor(int(progress * _steps(self.trainer))))

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the loss and the numbers of ``compute_metrics``, times the number of samples.

        The job's metrics are therefore means of those of the batches. This is exact for a metric
        that is itself a mean over samples, such as accuracy.
        """
        trainer = self.trainer
        metrics = trainer.compute_metrics
        count = _length(batch)
        loss, logits, labels = trainer.prediction_step(
            model, batch, prediction_loss_only=metrics is None
        )
        values: dict[str, Any] = {} if loss is None else {"loss": loss}
        if metrics is not None:
            if trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            values |= metrics(EvalPrediction(_arrays(logits), _arrays(labels)))
        sums = {name: torch.as_tensor(float(value) * count) for name, value in values.items()}
        return {**sums, "count": torch.tensor(count)}


def _check(trainer: Trainer) -> None:
    for name, why in _REFUSED.items():
        if getattr(trainer.args, name, None):
            raise _refused(name, why)
    if trainer.is_model_parallel:
        raise _refused("a model on several GPUs", "a worker trains on one")


def _refused(what: str, why: str) -> SpecError:
    return SpecError(f"task: the trainer can't be used with {what}: {why}", field="task")


def _steps(trainer: Trainer) -> int:
    """Return the steps of the trainer's own training."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    batches = -(-len(trainer.train_dataset) // args.train_batch_size)
    updates = max(1, -(-batches // args.gradient_accumulation_steps))
    steps: int = max(1, round(updates * args.num_train_epochs))
    return steps


def _factor(trainer: Trainer) -> Callable[[int], float]:
    if trainer.lr_scheduler is not None:
        scheduler = trainer.lr_scheduler
    else:
        some = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        scheduler = trainer.create_scheduler(_steps(trainer), some)
        trainer.lr_scheduler = None
    if not isinstance(scheduler, LambdaLR):
        raise _refused(
            f"the scheduler {type(scheduler).__name__}",
            "the learning rate must be a function of the step, as those of "
            "transformers.get_scheduler are",
        )
    return scheduler.lr_lambdas[0]


def _length(batch: Any) -> int:
    values = batch.values() if hasattr(batch, "values") else batch
    return int(next(len(value) for value in values if isinstance(value, Tensor) and value.ndim))


def _arrays(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_arrays(item) for item in value)
    return value.float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
