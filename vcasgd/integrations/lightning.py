"""``ModuleTask``: train a ``LightningModule`` on the data of a ``LightningDataModule``.

Lightning's own ``fit`` runs in a thread of the worker, over the batches of its leases. So
hooks, callbacks, and both kinds of optimization are Lightning's. Only what depends on more than one
worker is the job's: the counters, the schedulers, the evaluations, and the end.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import getitem
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vcasgd.errors import SpecError
from vcasgd.integrations.lightning_callbacks import (
    hooks_of,
    kept_callbacks,
    repeated_hooks,
    stops_after,
)
from vcasgd.integrations.lightning_trainer import ENDLESS, FitBatches, JobTrainer
from vcasgd.learning.optimizers import as_optimizer
from vcasgd.learning.training_set import LoaderData, data_of, evaluation_data_of, first_place
from vcasgd.session.loader import BatchLoader
from vcasgd.session.script import LoopInThread
from vcasgd.spec.job import JobSpec
from vcasgd.task.gradient_changes import find_changes, parsed
from vcasgd.task.loop_code import code_of_classes
from vcasgd.task.place import Place
from vcasgd.task.task import source_of, variables_of


class ModuleTask(LoopInThread):
    """Task made of a module and its data, which have the loaders if ``datamodule`` is None.

    For example, with ``task: train:task`` in the job file::

        task = ModuleTask(LitDigits, DigitsData, callbacks=[Ramp()])

    Both are classes, functions, or objects. The job's ``args`` are the arguments of ``module``.
    The other arguments are those of Lightning's ``Trainer``. The job file sets the length of the
    training. Methods raise :class:`~vcasgd.errors.SpecError` for a module that can't be trained
    this way.
    """

    name = "the module"
    #: Specification of the job, which the worker sets.
    spec: JobSpec | None = None
    #: Hooks know the job's step.
    sets_rates = True

    def __init__(
        self,
        module: LightningModule | Callable[..., LightningModule],
        datamodule: LightningDataModule | Callable[[], LightningDataModule] | None = None,
        *,
        callbacks: Callback | Sequence[Callback] | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        accumulate_grad_batches: int = 1,
        precision: str | int = "32-true",
        max_epochs: int | None = None,
        max_steps: int | None = None,
        devices: int | str | None = None,
        strategy: str = "auto",
        **others: Any,
    ) -> None:
        super().__init__()
        if not strategy.startswith(("auto", "ddp")):
            raise _refused(
                f"the strategy {strategy}",
                'each process has the whole model. Use "ddp", or write the training as a '
                'vcasgd.Task with parallel = "fsdp"',
            )
        #: GPUs of a worker, as the trainer would be told.
        self._devices = devices
        if others:
            raise _refused(
                f"{', '.join(others)} of the Trainer",
                "ModuleTask takes callbacks, gradient_clip_val, gradient_clip_algorithm, "
                "accumulate_grad_batches, and precision; the job file sets the rest",
            )
        # Lengths were needed by schedules. Now they follow the job's.
        del max_epochs, max_steps
        self._make, self._data, self._args = module, datamodule, dict[str, Any]()
        given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        self._callbacks = given
        self._accumulate = accumulate_grad_batches
        self._options: dict[str, Any] = {
            "gradient_clip_val": gradient_clip_val,
            "gradient_clip_algorithm": gradient_clip_algorithm,
            "accumulate_grad_batches": accumulate_grad_batches,
            "precision": precision,
        }
        if str(precision) in ("16-true", "transformer-engine"):
            raise _refused(f"precision {precision}", "use 32-true, bf16-mixed, or 16-mixed")
        self._trainer: JobTrainer | None = None
        self._evaluated: list[Callback] = []
        self._validation = _Validation()

    def __call__(self, **args: Any) -> ModuleTask:
        """Return the same task with a job's ``args``."""
        made = isinstance(self._make, LightningModule)
        if made and args:
            raise _refused("args for a module that is made", "pass its class")
        other = type(self)(
            *(self._make, self._data),
            callbacks=self._callbacks,
            devices=self._devices,
            **self._options,
        )
        other._args = args
        return other

    def follow_job(self, spec: JobSpec) -> None:
        self.spec = spec
        wanted = {"auto": None, "-1": "all"}.get(str(self._devices), self._devices)
        if wanted is not None and str(wanted) != str(spec.workers.gpus):
            raise _refused(
                f"devices={self._devices}",
                f"the job has workers.gpus: {spec.workers.gpus}. Set it to {wanted}, or leave "
                "devices out",
            )

    # -- the loop ------------------------------------------------------------------------------

    def run_loop(self) -> None:
        made, data = self._make, self._data
        is_made = isinstance(made, LightningModule)
        module: Any = copy.deepcopy(made) if is_made else made(**self._args)
        datamodule: Any = data() if callable(data) else copy.deepcopy(data)
        if not is_overridden("validation_step", module):
            raise _refused("no validation_step", "a job evaluates its model")
        callbacks = [*copy.deepcopy(self._callbacks), *_own_callbacks(module)]
        running, self._evaluated = kept_callbacks(callbacks)
        _quiet()
        options = dict(self._options)
        own = is_overridden("configure_gradient_clipping", module)
        if not own and options["gradient_clip_algorithm"] in (None, "norm"):
            # A step of the job clips the gradient of its whole batch, if that is known.
            self.clip_norm, options["gradient_clip_val"] = options["gradient_clip_val"], None
        self._trainer = JobTrainer(self, running, options)
        repeated = repeated_hooks(self._trainer, module, running)
        self.gradient_hooks, self.changes_of_hooks = repeated
        tree = parsed(code_of_classes([module, *running]))
        changes = self.gradient_hooks or find_changes(tree, classes=_classes([module, *running]))
        self.clips_itself = own or options["gradient_clip_val"] is not None or bool(changes)
        self.hooks = hooks_of(module, running)
        source: Any = module if datamodule is None else datamodule
        train, validation = source.train_dataloader, source.val_dataloader
        #: The loader of the module, or of its data.
        self.train_loader = cache(partial(_checked, train, "train_dataloader"))
        self._validation_loader = partial(_checked, validation, "val_dataloader")
        _replace(source, "train_dataloader", lambda: self._train_loader(module))
        _replace(source, "val_dataloader", lambda: self._validation)
        self._trainer.fit(module, datamodule=datamodule)

    def load_data(self) -> None:
        if self._dataset is not None:
            return
        loader = self.train_loader()
        train, validation = data_of(loader), evaluation_data_of(self._validation_loader())
        self.set_data(train.dataset, train.batch_size, train.collate, train.sampler)
        self.use_loader_settings(loader)
        self._validation.data = validation
        self.evaluation_batch_size = validation.batch_size
        self._evaluation_collate = validation.collate

    def _train_loader(self, module: LightningModule) -> BatchLoader | DataLoader[Any]:
        """Return the job's batches to the loop, and to others, such as those who want the length
        of an epoch, the module's own loader."""
        self.load_data()
        trainer = self.trainer
        if not trainer.job_loop.runs or trainer.batches is not None:
            return self.train_loader()
        self.set_model(module, as_optimizer(trainer.optimizers))
        trainer.batches = FitBatches(self, trainer, self._accumulate)
        return trainer.batches

    @property
    def trainer(self) -> JobTrainer:
        assert self._trainer is not None, "the loop has started"
        return self._trainer

    # -- the task ------------------------------------------------------------------------------

    def dataset(self, split: str) -> Dataset[Any]:
        if split == "train":
            return super().dataset(split)
        assert self._validation.data is not None, "the loop has started"
        return self._validation.data.dataset

    def check_evaluation(self) -> None:
        """Nothing: ``validation_step`` was checked."""

    def variables(self) -> dict[str, Callable[[], Any]]:
        """Return the callbacks, and attributes of the module that Lightning hasn't."""
        module: Any = self.network
        found: dict[str, Callable[[], Any]] = {
            name: partial(getitem, vars(module), name)
            for name in vars(module).keys() - vars(LightningModule()).keys()
        }
        return found | variables_of(self.trainer.callbacks)

    def loop_code(self) -> tuple[str, Container[str]]:
        objects = [self.network, *self.trainer.callbacks]
        return code_of_classes(objects), _classes(objects)

    def source(self) -> str:
        callbacks: list[Callback] = self.trainer.callbacks
        thaws = any(isinstance(each, BaseFinetuning) for each in callbacks)
        return source_of([self.network, *callbacks]) + ("\n# unfreeze" if thaws else "")

    def steps_of_job(self) -> Place:
        """Return the first place of the job, which has its length."""
        self.load_data()
        batch = self.batch_size if self.makes_steps else self.batch_size * self._accumulate
        # Without a job, one epoch.
        spec = self.spec or JobSpec.parse({"name": "module", "task": "module:task", "epochs": 1})
        return first_place(self, spec, batch)

    def evaluate_set(self, model: nn.Module, batches: Iterable[Any]) -> Mapping[str, float]:
        """Return what Lightning's validation loop logs.

        ``val_loss`` becomes ``loss``, and ``val_acc`` becomes ``accuracy``.
        """
        assert model is self.network, "a loop trains one model"
        self._validation.batches = batches
        logged = self.trainer.validated()
        return {_metric(name): float(value) for name, value in logged.items()}

    def end_after(self, metrics: Sequence[Mapping[str, float]]) -> str | None:
        return stops_after(self._evaluated, metrics, _metric)


class _Validation:
    """Iterable over the validation batches that a worker evaluates."""

    def __init__(self) -> None:
        self.data: LoaderData | None = None
        self.batches: Iterable[Any] = ()

    def __len__(self) -> int:
        assert self.data is not None, "the loop has started"
        if not hasattr(self.data.dataset, "__len__"):
            return ENDLESS
        return -(-len(self.data.dataset) // self.data.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _classes(objects: Iterable[object]) -> set[str]:
    """Return the names of the classes of objects, with their base classes."""
    return {kind.__name__ for each in objects for kind in type(each).__mro__}


def _quiet() -> None:
    """Leave out Lightning's advice for a computer, and its warnings of its own code."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")


def _own_callbacks(module: Any) -> list[Callback]:
    """Return the callbacks of ``configure_callbacks``, which Lightning then doesn't add itself."""
    found = module.configure_callbacks()
    _replace(module, "configure_callbacks", list)
    return list(found) if isinstance(found, Sequence) else [found]


def _replace(owner: Any, name: str, method: Callable[[], Any]) -> None:
    # Not as a submodule or a parameter.
    object.__setattr__(owner, name, method)


def _checked(make: Callable[[], Any], name: str) -> DataLoader[Any]:
    loader = make()
    if not isinstance(loader, DataLoader):
        raise _refused(f"{name} that returns a {type(loader).__name__}", "it must be a DataLoader")
    return loader


def _refused(what: str, why: str) -> SpecError:
    return SpecError(f"task: the module can't be trained with {what}: {why}", field="task")


def _metric(name: str) -> str:
    name = name.removeprefix("val_").removeprefix("val/")
    return "accuracy" if name == "acc" else name
