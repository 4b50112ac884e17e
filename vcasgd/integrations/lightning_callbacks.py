"""Callbacks of Lightning: those that run, that evaluations drive, or that a job refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import callbacks as lightning
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden

from vcasgd.errors import SpecError

#: What a job has itself: its page, its checkpoints and its best model, its metrics.
_JOBS_OWN = (
    lightning.ProgressBar,
    lightning.ModelSummary,
    lightning.Checkpoint,
    lightning.LearningRateMonitor,
    lightning.DeviceStatsMonitor,
)
#: Callbacks that can't be followed: why, and what to use instead.
_REFUSED = {
    lightning.StochasticWeightAveraging: (
        "it averages the weights of one worker",
        "average checkpoints, or set ema in the job file",
    ),
    lightning.WeightAveraging: (
        "it averages the weights of one worker",
        "set ema in the job file",
    ),
    lightning.GradientAccumulationScheduler: (
        "the batch of a job has one size",
        "use accumulate_grad_batches",
    ),
    lightning.Timer: ("a worker's time isn't the job's", "set stop.max_duration in the job file"),
    lightning.LearningRateFinder: ("it trains before the training", "find the rate first"),
    lightning.BatchSizeFinder: ("the batch of a job has one size", "find the size first"),
}


def kept_callbacks(callbacks: Iterable[Callback]) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks that Lightning runs, and those that the job's evaluations drive.

    Raises :class:`SpecError` for one that can't be followed.
    """
    running: list[Callback] = []
    evaluated: list[Callback] = []
    for each in callbacks:
        for kind, (why, remedy) in _REFUSED.items():
            if isinstance(each, kind):
                raise SpecError(
                    f"task: the callback {type(each).__name__} can't be used: {why}",
                    remedy=remedy,
                    field="task",
                )
        if isinstance(each, EarlyStopping):
            evaluated.append(each)
        elif not isinstance(each, _JOBS_OWN):
            running.append(each)
    return running, evaluated


#: Hooks of a module that often keep something between batches.
_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"),
)


def hooks_of(module: LightningModule, callbacks: Sequence[Callback]) -> list[str]:
    """Return the names of a module's own hooks and of callbacks."""
    own = [name for name in _HOOKS if is_overridden(name, module)]
    return [*own, *(type(each).__name__ for each in callbacks)]


def stops_after(
    callbacks: Sequence[Callback],
    metrics: Sequence[Mapping[str, float]],
    metric: Callable[[str], str],
) -> str | None:
    """Return why a callback for early stopping ends the training after evaluations with these
    metrics, whose names ``metric`` derives from Lightning's; None if none does.

    Raises :class:`SpecError` if the metric isn't evaluated.
    """
    for each in callbacks:
        assert isinstance(each, EarlyStopping), "see kept_callbacks"
        stopping, name = copy.deepcopy(each), metric(each.monitor)
        for values in metrics:
            if name not in values:
                if not each.strict:
                    continue
                raise SpecError(
                    f"task: EarlyStopping monitors {each.monitor}, but the evaluation has only "
                    f"{', '.join(sorted(values))}",
                    remedy="log it in validation_step",
                    field="task",
                )
            stops, why = stopping._evaluate_stopping_criteria(torch.tensor(values[name]))
            if stops:
                return f"EarlyStopping: {why}"
    return None
