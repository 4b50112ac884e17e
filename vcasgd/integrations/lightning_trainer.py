"""Lightning's trainer over the batches of a job, with the counters and the end of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from vcasgd.learning.optimizers import reevaluates
from vcasgd.session.loader import BatchLoader
from vcasgd.session.schedules import Replay
from vcasgd.task.place import Place

if TYPE_CHECKING:
    from vcasgd.integrations.lightning import ModuleTask

#: Batches of an epoch as Lightning sees it. The loader ends an epoch; a known length keeps
#: Lightning from loading a batch ahead.
ENDLESS = 10**12


class FitBatches(BatchLoader):
    """Loader of the worker's batches, which sets Lightning's counters for each."""

    step_remedy = (
        "make a step for each batch; to accumulate gradients in manual optimization, let the "
        "loader return all samples of a step as one batch"
    )

    def __init__(self, task: ModuleTask, trainer: JobTrainer, accumulation: int) -> None:
        assert task.user_optimizer is not None, "the model is set"
        super().__init__(task, task.user_optimizer, None, task, accumulation)
        self._trainer, self._part = trainer, 0
        self._manual = not trainer.lightning_module.automatic_optimization

    def __len__(self) -> int:
        return ENDLESS

    def wait(self) -> None:
        super().wait()
        self._part = 0

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        self._by_epoch = True
        return batches

    def begin_epoch(self) -> None:
        """Wait for the first batch of an epoch, and set the counters of the hooks at its start."""
        self.wait()
        assert self._script is not None, "a job"
        self._trainer.follow(self._script.place, 0)

    def _begin(self, *, ends_step: bool, weight: float = 1.0) -> None:
        super()._begin(ends_step=ends_step, weight=weight)
        assert self._script is not None, "a job"
        self._trainer.follow(self._script.place, self._part)
        self._part += 1

    def _watch_schedulers(self) -> None:
        if self._manual:
            super()._watch_schedulers()
        elif self._trainer.lr_scheduler_configs:
            replay = self._trainer.replayed()
            self._task.scheduled = lambda place: replay.at(place.step)


class JobTrainer(Trainer):  # type: ignore[misc]
    """Lightning's trainer, with the numbers of the job."""

    def __init__(
        self, task: ModuleTask, callbacks: list[Callback], options: Mapping[str, Any]
    ) -> None:
        super().__init__(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1,
            # Whatever started the worker, it is one process.
            plugins=LightningEnvironment(),
            callbacks=callbacks,
            # Modules may call methods of their logger.
            logger=DummyLogger(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            max_epochs=-1,
            **options,
        )
        self._task = task
        self._place, self._part = Place(0.0), 0
        self.batches: FitBatches | None = None
        self.fit_loop = self.job_loop = _JobFitLoop(self, min_epochs=0, max_epochs=-1)
        self.fit_loop.epoch_loop = _JobEpochLoop(self)
        plugin: Any = self.precision_plugin
        if getattr(plugin, "scaler", None) is None:
            plugin.optimizer_step = _gradient_first(plugin)

    def follow(self, place: Place, part: int) -> None:
        """Set all counters for a micro-batch of the step at a place of the job."""
        self._place, self._part = place, part
        fit, epoch, batches = self.fit_loop, self.fit_loop.epoch_loop, self.accumulate_grad_batches
        for progress in (fit.epoch_progress.current, fit.epoch_progress.total):
            progress.processed = progress.completed = place.epoch
            progress.ready = progress.started = place.epoch + 1
        index = place.batch * batches + part
        for progress, number in (
            (epoch.batch_progress.current, index),
            (epoch.batch_progress.total, place.step * batches + part),
        ):
            progress.ready = progress.started = progress.processed = progress.completed = number
        epoch.automatic_optimization.optim_progress.optimizer.step.total.completed = place.step
        epoch.manual_optimization.optim_step_progress.total.completed = place.step * len(
            self.optimizers
        )
        epoch._batches_that_stepped = place.step

    def replayed(self) -> Replay:
        """Return the options that the module's schedulers set, as Lightning calls them."""
        own = self.fit_loop.epoch_loop

        def advance(step: int) -> None:
            steps = self._task.place.epoch_steps
            before, (epoch, batch) = (self._place, self._part), divmod(step, steps)
            last = self.accumulate_grad_batches - 1
            place = Place(0.0, step + 1, epoch=epoch, batch=batch, epoch_steps=steps)
            self.follow(place, last)
            # Lightning counts a batch before it updates the schedulers.
            own.batch_progress.current.ready += 1
            own.update("step")
            if batch == steps - 1:
                own.update("epoch")
            self.follow(*before)

        schedulers = [each.scheduler for each in self.lr_scheduler_configs]
        return Replay(self.optimizers, schedulers, advance)

    def validated(self) -> dict[str, Any]:
        """Run the validation loop between two steps; return what it logs."""
        loop, connector = self.fit_loop.epoch_loop.val_loop, self._logger_connector
        first = connector._first_loop_iter
        self.validating = True
        try:
            outputs: list[Mapping[str, Any]] = loop.run()
        finally:
            self.training = True
            connector._first_loop_iter = first
        return {name: value for each in outputs for name, value in each.items()}

    @property
    def estimated_stepping_batches(self) -> int:
        return self._task.steps_of_job().steps

    @property
    def num_training_batches(self) -> int:
        return self._task.steps_of_job().epoch_steps * int(self.accumulate_grad_batches)

    @property
    def is_last_batch(self) -> bool:
        """True in the last batch of an epoch of the job, on each worker that has a part of it."""
        index = self._place.batch * int(self.accumulate_grad_batches) + self._part
        return index + 1 >= self.num_training_batches

    @property
    def train_dataloader(self) -> Any:
        """The loader of the module or its data, which has the length of an epoch."""
        return None if self.batches is None else self._task.train_loader()

    @property
    def max_epochs(self) -> int:
        return (self._task.spec and self._task.spec.epochs) or -1

    @property
    def max_steps(self) -> int:
        return (self._task.spec and self._task.spec.max_steps) or -1


class _JobFitLoop(_FitLoop):  # type: ignore[misc]
    """Loop over the epochs of a job, which ends it."""

    #: True after the start, when there are optimizers.
    runs = False

    def run(self) -> None:
        self.runs = True
        super().run()

    def setup_data(self) -> None:
        """Get the batches. Modules may ask for it earlier, to know the number of batches."""
        if self.runs:
            super().setup_data()

    @property
    def done(self) -> bool:
        return bool(self.trainer.should_stop)

    def on_advance_start(self) -> None:
        self.setup_data()
        assert self.trainer.batches is not None, "the loader is made"
        self.trainer.batches.begin_epoch()
        super().on_advance_start()


class _JobEpochLoop(_TrainingEpochLoop):  # type: ignore[misc]
    """Loop over the batches of an epoch, which the loader ends."""

    def update(self, interval: str) -> None:
        self._update_learning_rates(interval, update_plateau_schedulers=False)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Nothing: the options of the job's step are set before it."""

    def _num_ready_batches_reached(self) -> bool:
        return False

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:  # noqa: ARG002 - Lightning's
        return False

    def _should_accumulate(self) -> bool:
        return self.trainer.batches is not None and not self.trainer.batches.ends_step


def _gradient_first(plugin: Any) -> Callable[..., Any]:
    """Return an ``optimizer_step`` that computes the gradient before the step, not in it.

    So hooks of the optimizer see it, unless it computes the gradient several times.
    """

    wrapped = plugin.optimizer_step

    def optimizer_step(optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        if reevaluates(optimizer):
            return wrapped(optimizer, model, closure, **kwargs)
        result = plugin._wrap_closure(model, optimizer, closure)
        optimizer.step(lambda: result, **kwargs)
        return result

    return optimizer_step
