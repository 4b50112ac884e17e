"""Callbacks of Lightning: those that run, that evaluations drive, or that a job refuses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden

from vcasgd.errors import SpecError
from vcasgd.task.loop_clips import Clip
from vcasgd.task.loop_code import changes_of_hook

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
    own = [name for name in _HOOKS if is_overridden(name, module)]
    return [*own, *(type(each).__name__ for each in callbacks)]


#: Hooks between the computation of gradients and the step, in the order of the calls.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


def repeated_hooks(
    trainer: Trainer, module: LightningModule, callbacks: Sequence[Callback]
) -> tuple[list[str], Callable[[], Clip] | None]:
    """Return the names of the hooks that change gradients, and what returns a call that changes
    them again.

    Returns None for it if there are no such hooks, or if one needs more than the gradients.
    """
    names: list[str] = []
    found: list[Callable[[], Clip]] = []
    for name in _GRADIENT_HOOKS:
        known = hasattr(Callback, name)
        own = [one for one in callbacks if known and is_overridden(name, one, parent=Callback)]
        for each in [*own, *([module] if is_overridden(name, module) else [])]:
            hook: Any = inspect.unwrap(getattr(type(each), name))
            code = changes_of_hook(hook)
            if code is None and ".grad" not in inspect.getsource(hook):
                continue
            summed = trainer.accumulate_grad_batches > 1 and name == "on_after_backward"
            if code is None or summed or not module.automatic_optimization:
                return [], None
            names.append(name)
            found.append(partial(_in_hook, code, hook, each, trainer))
    return names, partial(_in_turn, found) if found else None


def _in_turn(hooks: Sequence[Callable[[], Clip]]) -> Clip:
    calls = [each() for each in hooks]
    return lambda: [each() for each in calls]


def _in_hook(
    code: CodeType, hook: FunctionType, owner: LightningModule | Callback, trainer: Trainer
) -> Clip:
    module = trainer.lightning_module
    given = [owner] if owner is module else [owner, trainer, module]
    given += [*trainer.optimizers, trainer.gradient_clip_val, trainer.gradient_clip_algorithm]
    arguments = dict(zip(inspect.signature(hook).parameters, given, strict=False))
    outer = inspect.getclosurevars(hook).nonlocals
    return partial(exec, code, {**hook.__globals__, **outer, **arguments})


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
