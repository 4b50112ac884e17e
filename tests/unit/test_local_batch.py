"""Each worker's part of the job's batch."""

from __future__ import annotations

import pytest

from vcasgd.learning.local_batch import MIN_INTERVALS, LocalBatch


def trained(job_batch: int, workers: int, seconds: float = 1.0) -> LocalBatch:
    """Return the batch of a worker that has trained and been measured."""
    batch = LocalBatch(job_batch, workers)
    for _ in range(MIN_INTERVALS):
        batch.measure(seconds)
    return batch


@pytest.mark.parametrize(
    ("job_batch", "workers", "size"),
    [(32, 1, 32), (32, 4, 8), (32, 3, 32 / 3), (32, 100, 2), (1, 1, 1), (2, 4, 2), (32, 0, 32)],
)
def test_starts_with_an_equal_part(job_batch: int, workers: int, size: float) -> None:
    batch = LocalBatch(job_batch, workers)
    assert batch.size == pytest.approx(size)
    batch.follow(0, 0, 0.0, 0.0)
    assert batch.size == pytest.approx(size), "before the first round"


@pytest.mark.parametrize(
    ("total", "size"),
    [(32, 8), (16, 16), (64, 4), (1, 32), (1000, 2), (0, 8)],
    ids=["all", "half-left", "twice-as-many", "alone", "too-many", "unknown"],
)
def test_all_batches_add_up_to_the_jobs(total: float, size: float) -> None:
    batch = trained(32, 4)

    batch.follow(1, 4, total, 0.0)

    assert batch.size == pytest.approx(size)


def test_a_new_worker_starts_with_a_batch_like_those_of_the_others() -> None:
    # Given two workers, and a third one that is new
    batches = [trained(32, 2), trained(32, 2), LocalBatch(32, 1)]
    batches[2].follow(7, 2, 32.0, 1.0)
    assert batches[2].size == 16

    # When all see the round that it was in
    batches[2].measure(1.0)
    for batch in batches:
        batch.follow(8, 3, 48.0, 1.0)

    # Then each has a third
    assert [batch.size for batch in batches] == [pytest.approx(32 / 3)] * 3


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        pytest.param((1.0,) * MIN_INTERVALS, 8, id="equal"),
        pytest.param((1.1,) * MIN_INTERVALS, 8, id="noise"),
        pytest.param((2.0,) * MIN_INTERVALS, 4, id="slow"),
        pytest.param((0.5,) * MIN_INTERVALS, 16, id="fast"),
        pytest.param((100.0,) * MIN_INTERVALS, 2, id="far too slow"),
        pytest.param((4.0,), 8, id="once"),
        pytest.param((0.9, 4.0, 2.5), 8 / 2.5, id="since a while"),
        pytest.param((0.25, 0.5), 16, id="less and less fast"),
        pytest.param((4.0, 1.0), 8, id="a pause"),
        pytest.param((1.5, 1.5), 8, id="slightly, twice"),
        # A small difference counts if it is steady.
        pytest.param((1.1,) * 5, 8 / 1.1, id="steady"),
        pytest.param((1.1,) * 4, 8, id="too few"),
        pytest.param((1.1, 1.1, 1.0, 1.1, 1.1), 8, id="not always"),
        pytest.param((1.03,) * 5, 8, id="too small"),
    ],
)
def test_a_slow_worker_takes_fewer_samples(seconds: tuple[float, ...], size: float) -> None:
    batch = LocalBatch(32, 4)
    for each in seconds:
        batch.measure(each)

    batch.follow(1, 4, 32.0, 1.0)

    assert batch.size == pytest.approx(size)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 2.0])
def test_a_worker_that_is_alone_trains_whole_batches(seconds: float) -> None:
    batch = trained(32, 1)

    batch.follow(1, 1, 32.0, seconds)

    assert batch.size == 32


def test_speed_is_known_when_the_number_of_workers_has_changed() -> None:
    batch = trained(32, 4, 1.0)

    # Each version counts once.
    for _ in range(2):
        batch.follow(1, 2, 16.0, 0.0)

    assert (batch.size, batch.step_seconds) == (16, 2.0)


def test_speed_is_measured_again_after_a_change() -> None:
    batch = trained(32, 4, 2.0)

    for version in (1, 2):
        batch.follow(version, 4, 32.0, 1.0)

    assert (batch.size, batch.step_seconds) == (4, 0.0)


def test_workers_find_their_parts_in_one_round() -> None:
    """Three take 0.1 seconds for 8 samples, and one takes four times as long."""
    paces = [80.0, 80.0, 80.0, 20.0]
    batches = [trained(32, 4, 8 / pace) for pace in paces]

    for batch in batches:
        batch.follow(1, 4, 32.0, 32 / sum(paces))

    assert [each.size for each in batches] == pytest.approx([32 * pace / 260 for pace in paces])
