"""Batches of a task's data, as a worker loads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vcasgd.learning.training import batch_size_of, batches_of, step_groups
from vcasgd.task.task import Task


def batches(
    task: Task, dataset: Dataset[Any], indices: NDArray[np.int64], size: int | None = None
) -> Iterator[tuple[Any, int]]:
    """Return batches of ``size`` samples, by default the task's, in the order of ``indices``."""
    groups = step_groups(indices, size or batch_size_of(task))
    return batches_of(task, dataset, [(group, len(group)) for group in groups])
