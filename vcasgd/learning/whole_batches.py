"""Size of a worker's part of the job's batch at least, and so the workers that can share it."""

from __future__ import annotations

from dataclasses import dataclass

#: Least samples of a local batch: code that is written for batches may fail with a single sample.
MIN_BATCH = 2
#: The same of a model that normalizes over its batch, whose statistics are noisier in smaller ones.
MIN_NORMALIZED = 16


@dataclass(frozen=True)
class Division:
    """Samples that a part of a batch needs at least, and the reason, for people."""

    least: int
    why: str = ""


def most_workers(batch_size: int, min_local_batch: int) -> int:
    """Return how many workers can share a batch of so many samples, at least 1."""
    return max(1, batch_size // min_local_batch)
