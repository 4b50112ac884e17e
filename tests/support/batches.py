"""Batches of a task's data, and steps on them, as a worker loads and makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.learning.training import Interval, batch_size_of, batches_of, step_groups, train
from vcasgd.task.task import Task


def batches(
    task: Task, dataset: Dataset[Any], indices: NDArray[np.int64], size: int | None = None
) -> Iterator[tuple[Any, int]]:
    """Return batches of ``size`` samples, by default the task's, in the order of ``indices``."""
    groups = step_groups(indices, size or batch_size_of(task))
    return batches_of(task, dataset, [(group, len(group)) for group in groups])


def trained_on(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    samples: int,
    size: int | None = None,
    **options: Any,
) -> Interval:
    """Train the first ``samples`` of the task's data set in their order, in batches of ``size``."""
    stream = batches(task, task.dataset("train"), np.arange(samples), size)
    return train(task, model, optimizer, stream, "cpu", **options)
