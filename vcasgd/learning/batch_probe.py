"""Measurements of a job's batches that its first worker makes before any training."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vcasgd.learning.training import batch_size_of
from vcasgd.learning.whole_batches import MIN_BATCH, MIN_NORMALIZED, Division
from vcasgd.task.task import Task


def division_of(task: Task, module: nn.Module) -> Division:
    """Return how small a part of a batch may be: what the task says, or else a guess.

    Raises :class:`~vcasgd.errors.SpecError` for an invalid ``min_local_batch``.
    """
    batch_size = batch_size_of(task)
    if task.min_local_batch is not None:
        least = batch_size_of(task, "min_local_batch")
        return Division(min(least, batch_size), "the task sets min_local_batch")
    normalized = _normalized(module)
    if normalized is not None:
        least, why = MIN_NORMALIZED, f"{normalized} normalizes over the batch"
    else:
        least, why = MIN_BATCH, ""
    return Division(min(least, batch_size), why)


def _normalized(module: nn.Module) -> str | None:
    """Return the type and name of a layer that normalizes over the batch; None without one."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            return f"{type(layer).__name__} {name}"
    return None
