"""``ModuleTask``: train a ``LightningModule`` on the data of a ``LightningDataModule``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vcasgd.errors import SpecError
from vcasgd.session.loader import evenly_drawn
from vcasgd.session.schedules import factors
from vcasgd.task.task import Task


class ModuleTask(Task):
    """Task made of a module and its data, which have the loaders if ``datamodule`` is None.

    For example, with ``task: train:task`` in the job file::

        task = ModuleTask(LitDigits, DigitsData, max_epochs=10)

    Both are classes, functions, or objects. The job's ``args`` are the arguments of ``module``.
    The other arguments are those of Lightning's trainer; ``max_epochs`` and ``max_steps`` are
    needed only by the module's scheduler. Methods raise
    :class:`~vcasgd.errors.SpecError` for a module that can't be trained this way.
    """

    #: A module counts its batches, and may keep its optimizer.
    repeatable = False

    def __init__(
        self,
        module: LightningModule | Callable[..., LightningModule],
        datamodule: LightningDataModule | Callable[[], LightningDataModule] | None = None,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        gradient_clip_val: float | None = None,
        accumulate_grad_batches: int = 1,
        precision: str | int = "32-true",
    ) -> None:
        self._make, self._data, self._args = module, datamodule, dict[str, Any]()
        self._lengths = {"epoch": max_epochs, "step": max_steps}
        self.clip_norm = gradient_clip_val
        self.gradient_accumulation_steps = accumulate_grad_batches
        self.mixed_precision = _mixed_precision(precision)
        self._modules: list[LightningModule] = []
        self._loaders: dict[str, DataLoader[Any]] = {}
        self._factors: tuple[float, ...] | None = None
        self._batches = 0

    def __call__(self, **args: Any) -> ModuleTask:
        """Return the same task with a job's ``args``."""
        other = copy.copy(self)
        other._args, other._modules, other._loaders = args, [], {}
        return other

    # -- model and data ------------------------------------------------------------------------

    def model(self) -> nn.Module:
        """Return the module."""
        made = self._make
        # An object is kept as it is, so that each call returns the initial values.
        is_made = isinstance(made, LightningModule)
        module: Any = copy.deepcopy(made) if is_made else made(**self._args)
        if not module.automatic_optimization:
            raise _refused("manual optimization", "the worker makes the steps")
        self._modules.append(module)
        steps = self.gradient_accumulation_steps
        self.batch_size = _batch_size(self._loader("train")) * steps
        self.use_loader_settings(self._loader("train"))
        self.evaluation_batch_size = _batch_size(self._loader("validation"))
        network: nn.Module = module
        return network

    def dataset(self, split: str) -> Dataset[Any]:
        """Return the data set of ``train_dataloader`` or ``val_dataloader``."""
        return self._loader(split).dataset

    def collate(self, samples: list[Any]) -> Any:
        """Combine samples as the loader for training does."""
        return self._loader("train").collate_fn(samples)

    def _loader(self, split: str) -> DataLoader[Any]:
        if not self._loaders:
            data: Any = self._modules[0]
            if self._data is not None:
                is_made = isinstance(self._data, LightningDataModule)
                data = self._data if is_made else self._data()
            data.prepare_data()
            data.setup("fit")
            self._loaders["train"] = _checked(data.train_dataloader(), "train_dataloader")
            self._loaders["validation"] = _checked(data.val_dataloader(), "val_dataloader")
        return self._loaders[split]

    # -- training ------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of ``training_step``."""
        _log_into(model, {})
        self._batches += 1
        result = model.training_step(batch, self._batches - 1)  # type: ignore[operator]
        loss = result["loss"] if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise _refused("a training_step without a loss", "every sample has to be trained")
        return loss

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return a new optimizer of ``configure_optimizers``."""
        first = next(iter(parameters))
        owner = next(one for one in self._modules if any(first is p for p in one.parameters()))
        return _configured(owner)[0]

    def schedule(self, progress: float) -> float:
        """Return the factor of the module's scheduler at this share of the training."""
        if self._factors is None:
            self._factors = self._sampled()
        return self._factors[int(progress * len(self._factors))]

    def _sampled(self) -> tuple[float, ...]:
        _, scheduler, interval = _configured(self._modules[0])
        if scheduler is None:
            return (1.0,)
        length = self._lengths.get(interval)
        if length is None:
            raise SpecError(
                f"task: the scheduler needs the number of {interval}s",
                remedy=f"pass max_{interval}s to ModuleTask",
                field="task",
            )
        return factors(scheduler, length)

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return what ``validation_step`` logs, times the number of samples.

        ``val_loss`` becomes ``loss``, and ``val_acc`` becomes ``accuracy``.
        """
        values: dict[str, Any] = {}
        _log_into(model, values)
        result = model.validation_step(batch, 0)  # type: ignore[operator]
        if not values and isinstance(result, Tensor):
            values["loss"] = result
        count = _length(batch)
        sums = {
            _metric(name): torch.as_tensor(_number(each)) * count for name, each in values.items()
        }
        return {**sums, "count": torch.tensor(count)}


def _mixed_precision(precision: str | int) -> str | None:
    types = {"32-true": None, "32": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
    if str(precision) not in types:
        raise _refused(f"precision {precision}", f"use one of {', '.join(types)}")
    return types[str(precision)]


def _log_into(model: nn.Module, values: dict[str, Any]) -> None:
    """Record what a module logs, which needs a trainer otherwise."""

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        values[name] = value

    # Not as a submodule or a parameter.
    object.__setattr__(model, "log", log)


def _configured(module: LightningModule) -> tuple[Optimizer, Any, str]:
    """Return the optimizer, its scheduler or None, and the scheduler's interval."""
    found: Any = module.configure_optimizers()
    scheduler: Any = None
    if isinstance(found, dict):
        found, scheduler = found["optimizer"], found.get("lr_scheduler")
    elif isinstance(found, tuple | list) and found and isinstance(found[0], list | tuple):
        found, scheduler = found[0], found[1]
    optimizers = list(found) if isinstance(found, tuple | list) else [found]
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise _refused(f"{len(optimizers)} optimizers", "a step of a job is one optimizer's step")
    if isinstance(scheduler, tuple | list):
        scheduler = scheduler[0] if scheduler else None
    interval = "epoch"
    if isinstance(scheduler, dict):
        interval, scheduler = scheduler.get("interval", interval), scheduler["scheduler"]
    return optimizers[0], scheduler, interval


def _checked(loader: Any, name: str) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise _refused(f"{name} that returns a {type(loader).__name__}", "it must be a DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise _refused(
            f"{name} of an IterableDataset",
            "each sample needs an index, so that it counts exactly once",
        )
    return evenly_drawn(loader)


def _batch_size(loader: DataLoader[Any]) -> int:
    assert loader.batch_size is not None, "the loader was checked"
    return loader.batch_size


def _refused(what: str, why: str) -> SpecError:
    return SpecError(f"task: the module can't be trained with {what}: {why}", field="task")


def _metric(name: str) -> str:
    name = name.removeprefix("val_").removeprefix("val/")
    return "accuracy" if name == "acc" else name


def _number(value: Any) -> float:
    # A metric of torchmetrics keeps the value of the last batch.
    return float(getattr(value, "_forward_cache", value))


def _length(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch)
    values = batch.values() if isinstance(batch, dict) else batch
    return next(
        _length(value) for value in values if isinstance(value, Tensor | dict | list | tuple)
    )
