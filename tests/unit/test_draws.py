"""Draws of samplers: numbered, and the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.draws import Draws, InOrder, order_of
from vcasgd.learning.training_set import TrainingSet, data_of
from vcasgd.session.script import LoopTask

DATA = TensorDataset(torch.arange(40.0))


class Remembers(Sampler[int]):
    """Shuffles with a generator of its own, which each epoch continues."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)
        self.order = np.arange(20)

    def __iter__(self) -> Iterator[int]:
        self.generator.shuffle(self.order)
        return iter(self.order.tolist())


class OfEpoch(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(each + self.epoch) % 20 for each in range(20)])


class Buckets(Sampler[list[int]]):
    """Batches of 2 and of 6."""

    def __iter__(self) -> Iterator[list[int]]:
        for first in torch.randperm(5).tolist():
            yield from ([first * 8, first * 8 + 1], list(range(first * 8 + 2, first * 8 + 8)))


class Shrinks(OfEpoch):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20 - self.epoch))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(20.0), 50),
    "weighted, generator": lambda: WeightedRandomSampler(
        torch.arange(20.0), 50, generator=torch.Generator().manual_seed(1)
    ),
    "replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=30),
    "subset": lambda: SubsetRandomSampler([1, 4, 9, 16]),
    "own generator": Remembers,
    "set_epoch": OfEpoch,
    "batches": Buckets,
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_machine_that_joins_later_draws_the_same(make: Any) -> None:
    first, later = Draws(make(), DATA, seed=7), Draws(make(), DATA, seed=7)
    # One machine is ahead of the seeds that the other one has used.
    torch.rand(5)

    epochs = [first.indices(epoch, 0, 50).tolist() for epoch in range(6)]

    assert later.indices(4, 0, 50).tolist() == epochs[4]
    # Also an epoch that was forgotten.
    assert later.indices(1, 0, 50).tolist() == epochs[1]
    assert len({tuple(indices) for indices in epochs}) > 1
    assert later.indices(2, 1, 3).tolist() == epochs[2][1:3]


def test_an_own_generator_goes_on_as_in_a_plain_loop() -> None:
    plain = Remembers()
    epochs = [list(plain) for _ in range(3)]

    draws = Draws(Remembers(), DATA, seed=0)

    assert [draws.indices(epoch, 0, 20).tolist() for epoch in range(3)] == epochs


def test_random_numbers_of_training_stay() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)

    Draws(WeightedRandomSampler(torch.arange(20.0), 50), DATA, seed=7)

    assert torch.equal(torch.rand(3), wanted)


def test_batches_end_where_the_sampler_ends_them() -> None:
    draws = Draws(Buckets(), DATA, seed=7)

    assert draws.batch_size == 4
    ends = draws.ends(0)
    assert ends is not None
    assert ends.tolist() == [2, 8, 10, 16, 18, 24, 26, 32, 34, 40]


@pytest.mark.parametrize(
    ("sampler", "indices"),
    [
        (None, None),
        (RandomSampler(DATA), None),
        (SequentialSampler(DATA), [5, 6, 7]),
        (range(40), [5, 6, 7]),
    ],
    ids=["none", "shuffled", "sequential", "range"],
)
def test_plain_orders_need_no_list(sampler: Any, indices: list[int] | None) -> None:
    order = order_of(sampler, DATA, seed=0)

    if indices is None:
        assert order is None
    else:
        assert isinstance(order, InOrder)
        assert order.indices(3, 5, 8).tolist() == indices


class Indexed(IterableDataset[int]):
    """Can be iterated over, and has indices and shards as well, as of MosaicML streaming."""

    samples_per_shard = np.array([3, 3, 2])

    def __init__(self, *, shuffle: bool, epoch_size: int = 8) -> None:
        self.shuffle, self.epoch_size = shuffle, epoch_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch_size))

    def __len__(self) -> int:
        return self.epoch_size

    def __getitem__(self, index: int) -> int:
        return range(8)[index]


def task_over(dataset: Any) -> Any:
    """Return a task that was given a loader over a data set."""
    given = data_of(DataLoader(dataset, batch_size=2))
    task = LoopTask()
    task.set_data(given.dataset, given.batch_size, given.collate, given.sampler)
    return task


def test_an_iterable_data_set_with_indices_keeps_its_order_or_its_shards() -> None:
    ordered, data = (
        TrainingSet.of(task_over(Indexed(shuffle=shuffle)), seed=0) for shuffle in (False, True)
    )

    assert isinstance(ordered.order, InOrder)
    assert data.order is None
    assert data.blocks is not None
    assert data.blocks.sizes == (3, 3, 2)


def test_a_part_of_a_streaming_data_set_as_epoch_is_refused() -> None:
    with pytest.raises(SpecError, match=r"has 8 samples, and 5 in an epoch .*leave out epoch_size"):
        TrainingSet.of(task_over(Indexed(shuffle=True, epoch_size=5)), seed=0)


def test_a_loader_as_a_task_s_data_set_is_refused() -> None:
    task = LoopTask()
    task.set_data(DataLoader(DATA), 2, default_collate)

    with pytest.raises(SpecError, match=r"dataset\('train'\) returns a DataLoader .*its data set"):
        TrainingSet.of(task, seed=0)


def test_a_sampler_that_changes_is_an_error() -> None:
    with pytest.raises(UserCodeError, match="has 19 draws in epoch 2, and 20 in the first"):
        Draws(Shrinks(), DATA, seed=0).indices(1, 0, 1)

    sampler = WeightedRandomSampler(torch.arange(20.0), 50)
    draws = Draws(sampler, DATA, seed=0)
    sampler.weights[3] = 9.0
    with pytest.raises(UserCodeError, match="was changed while the job trains"):
        draws.indices(1, 0, 1)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [([], "draws nothing"), (["a"], "draws what is no index"), ((i for i in "12"), "be copied")],
    ids=["empty", "text", "a generator"],
)
def test_draws_that_are_no_order_are_refused(sampler: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Draws(sampler, DATA, seed=0)
