"""Measurement of a worker's waiting time for the shards of its data set, without training."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcasgd.data import ShardedDataset
from vcasgd.learning.subtasks import EpochPlan

#: Name → (samples are in shard order, shards are prefetched).
WAYS = {
    "any order": (False, False),
    "order of shards": (True, False),
    "order of shards, prefetched": (True, True),
}


@dataclass(frozen=True)
class Reading:
    """Parameters of the measurement: one of several workers that take turns, and its caches."""

    workers: int
    subtasks: int
    batch_size: int
    step_seconds: float
    memory_bytes: int
    disk_bytes: int


def measure_reading(location: str, reading: Reading) -> list[dict[str, Any]]:
    """Measure each of :data:`WAYS` with empty caches.

    Each row has the seconds of one worker's epoch and the counters of its data set. Raises the
    errors of :class:`~vcasgd.data.ShardedDataset`.
    """
    rows = []
    for name, (in_shards, ahead) in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="vcasgd-bench-") as folder:
            dataset = ShardedDataset(
                location,
                memory_bytes=reading.memory_bytes,
                disk_bytes=reading.disk_bytes,
                cache_dir=Path(folder),
            )
            try:
                seconds = _read(dataset, reading, in_shards=in_shards, ahead=ahead)
            finally:
                dataset.close()
            rows.append({"reading": name, "seconds": seconds, **dataset.read_counters()})
    return rows


def _read(dataset: ShardedDataset, reading: Reading, *, in_shards: bool, ahead: bool) -> float:
    blocks = dataset.blocks if in_shards else None
    plan = EpochPlan(len(dataset), reading.subtasks, 1, 0, blocks)
    mine = range(0, plan.total_subtasks, reading.workers)
    started = time.monotonic()
    for subtask in mine:
        indices = plan.indices(subtask, 0, plan.size(subtask))
        if ahead:
            following = min(subtask + reading.workers, plan.total_subtasks - 1)
            dataset.will_read(indices)
            dataset.will_read(plan.indices(following, 0, plan.size(following)))
        for first in range(0, len(indices), reading.batch_size):
            dataset.__getitems__(indices[first : first + reading.batch_size].tolist())
            time.sleep(reading.step_seconds)
    return time.monotonic() - started
