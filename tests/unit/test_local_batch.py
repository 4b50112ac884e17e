"""Each worker's part of the job's batch."""

from __future__ import annotations

import pytest

from vcasgd.learning.local_batch import LEAST_INTERVALS, LocalBatch


def trained(job_batch: int, workers: int, seconds: float = 1.0) -> LocalBatch:
    """Return the batch of a worker that has trained and been measured."""
    batch = LocalBatch(job_batch, workers)
    for _ in range(LEAST_INTERVALS):
        batch.measure(seconds)
    return batch


@pytest.mark.parametrize(
    ("job_batch", "workers", "size"),
    [(32, 1, 32), (32, 4, 8), (32, 3, 32 / 3), (32, 100, 2), (1, 1, 1), (2, 4, 2), (32, 0, 32)],
)
def test_starts_with_an_equal_part(job_batch: int, workers: int, size: float) -> None:
    assert LocalBatch(job_batch, workers).size == pytest.approx(size)


@pytest.mark.parametrize(
    ("total", "size"),
    [(32, 8), (16, 16), (64, 4), (1, 32), (1000, 2), (0, 8)],
    ids=["all", "half-left", "twice-as-many", "alone", "too-many", "unknown"],
)
def test_all_batches_add_up_to_the_jobs(total: float, size: float) -> None:
    batch = trained(32, 4)

    batch.follow(1, 4, total, 0.0)

    assert batch.size == pytest.approx(size)


def test_a_new_worker_takes_an_equal_part() -> None:
    batch = LocalBatch(32, 1)

    batch.follow(7, 3, 32.0, 1.0)

    assert batch.size == 8


def test_each_version_counts_once() -> None:
    batch = trained(32, 4)

    batch.follow(1, 2, 16.0, 0.0)
    batch.follow(1, 2, 16.0, 0.0)

    assert batch.size == 16


def test_nothing_changes_before_the_first_round() -> None:
    batch = LocalBatch(32, 4)

    batch.follow(0, 0, 0.0, 0.0)

    assert batch.size == 8


@pytest.mark.parametrize(
    ("seconds", "size"),
    [(1.0, 8), (1.1, 8), (2.0, 4), (0.5, 16), (100.0, 2)],
    ids=["equal", "noise", "slow", "fast", "far-too-slow"],
)
def test_a_slow_worker_takes_fewer_samples(seconds: float, size: float) -> None:
    batch = trained(32, 4, seconds)

    batch.follow(1, 4, 32.0, 1.0)

    assert batch.size == pytest.approx(size)


def test_speed_is_measured_again_after_a_change() -> None:
    batch = trained(32, 4, 2.0)
    batch.follow(1, 4, 32.0, 1.0)

    batch.follow(2, 4, 32.0, 1.0)

    assert (batch.size, batch.step_seconds) == (4, 0.0)
