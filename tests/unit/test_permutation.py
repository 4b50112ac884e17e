"""Computed permutations: each number once, as if shuffled, in constant memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from vcasgd.learning.permutation import CHUNK, SHUFFLED, permuted
from vcasgd.learning.subtasks import EpochPlan, SampleBlocks

SIZE = 200_003
SEEDS = [(0, 0), (7, 0)]


@pytest.mark.parametrize(
    "size",
    [
        *range(1, 20), 97, 128, 4096, SHUFFLED - 1, SHUFFLED,
        SHUFFLED + 1, 99_991, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, SIZE,
    ],
)  # fmt: skip
def test_each_number_occurs_once(size: int) -> None:
    order = permuted((3, 1), size, 0, size)

    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [100, SHUFFLED, SIZE])
def test_a_part_is_that_of_the_whole(size: int) -> None:
    whole = permuted((3, 1), size, 0, size)

    for start in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, size - 1, size):
        for length in (0, 1, 99, CHUNK, 2 * CHUNK):
            stop = min(start + length, size)
            part = permuted((3, 1), size, min(start, size), stop)
            assert np.array_equal(part, whole[start:stop])


def test_it_is_the_same_on_every_machine() -> None:
    assert permuted((3, 1), 10**9, 0, 4).tolist() == [401784712, 174873877, 917728149, 774610509]


@pytest.mark.parametrize("seed", SEEDS)
class TestQuality:
    """Six standard deviations and more of what chance yields, with fixed seeds."""

    def test_numbers_rarely_stay_in_place(self, seed: tuple[int, int]) -> None:
        assert np.count_nonzero(permuted(seed, SIZE, 0, SIZE) == np.arange(SIZE)) < 10

    def test_each_part_of_an_epoch_has_samples_of_all_of_the_data_set(
        self, seed: tuple[int, int]
    ) -> None:
        for part in np.array_split(permuted(seed, SIZE, 0, SIZE), 50):
            counts = np.histogram(part, bins=20, range=(0, SIZE))[0]
            # 19 degrees of freedom
            assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 60

    def test_neighbors_have_nothing_in_common(self, seed: tuple[int, int]) -> None:
        order = permuted(seed, SIZE, 0, SIZE)

        for apart in (1, 2, 3, 64, 256, 1024, CHUNK):
            one, other = order[:-apart], order[apart:]
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.015
            _, times = np.unique(other - one, return_counts=True)
            assert times.max() < 12, "no difference is frequent"
            for bit in range(14):  # Higher ones are set in less than half of the numbers.
                assert abs(np.mean((one ^ other) >> bit & 1) - 0.5) < 0.02

    def test_epochs_and_seeds_differ(self, seed: tuple[int, int]) -> None:
        order = permuted(seed, SIZE, 0, SIZE)

        for other in {*SEEDS, (seed[0], 100)} - {seed}:
            another = permuted(other, SIZE, 0, SIZE)
            assert np.count_nonzero(order == another) < 10
            assert abs(np.corrcoef(order, another)[0, 1]) < 0.015


@pytest.mark.parametrize("shards", [0, 1000])
def test_an_order_of_a_billion_samples_takes_constant_memory(shards: int) -> None:
    samples = 10**9
    blocks = SampleBlocks((samples // shards,) * shards, window=4) if shards else None
    plan = EpochPlan(samples, 100_000, 3, seed=1, blocks=blocks)
    tracemalloc.start()
    try:
        found = [plan.indices(subtask, 0, 1000) for subtask in range(0, 300_000, 30_000)]
        plan.order_digest()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 << 20
    assert all(part.min() >= 0 and part.max() < samples for part in found)
