"""Samples that can't be loaded or trained: which of a batch they are, and what is left of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from vcasgd.errors import DataError, SpecError
from vcasgd.learning.bad_samples import culprits
from vcasgd.learning.tolerant_loading import FetchedSamples, TolerantDataset, collated
from vcasgd.spec.job import JobSpec


@pytest.mark.parametrize(
    ("count", "bad"),
    [(1, []), (1, [0]), (2, [1]), (8, []), (8, [3]), (8, [0, 7]), (7, [2, 3]), (4, [0, 1, 2, 3])],
)
def test_culprits_are_the_samples_that_are_unsound_on_their_own(count: int, bad: list[int]) -> None:
    tried: list[Sequence[int]] = []

    def is_sound(indices: Sequence[int]) -> bool:
        tried.append(indices)
        return not set(indices) & set(bad)

    assert culprits(range(count), is_sound) == bad
    assert len(tried) <= 2 * count


def test_a_batch_that_is_unsound_only_as_a_whole_has_no_culprits() -> None:
    assert culprits(range(8), lambda indices: len(indices) < 8) == []


class Damaged(Dataset[Any]):
    """Samples of which some raise."""

    def __init__(self, bad: dict[int, Exception], *, together: bool) -> None:
        self._bad = bad
        if together:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def __getitem__(self, index: int) -> int:
        if index in self._bad:
            raise self._bad[index]
        return index * 10


@pytest.mark.parametrize("together", [False, True])
def test_samples_that_raise_are_left_out_and_named(together: bool) -> None:
    data = Damaged({4: ValueError("no image"), 1: KeyError("label")}, together=together)

    fetched = TolerantDataset(data).__getitems__([7, 4, 0, 1])

    assert (fetched.indices, fetched.samples) == ([7, 0], [70, 0])
    assert [(bad.index, bad.why) for bad in fetched.bad] == [
        (4, "ValueError: no image"),
        (1, "KeyError: 'label'"),
    ]


def test_an_error_of_the_storage_is_no_bad_sample() -> None:
    data = TolerantDataset(Damaged({2: DataError("the bucket is gone")}, together=False))

    with pytest.raises(DataError):
        data.__getitems__([1, 2])


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ([3, 3, 3], [0, 1, 2]),
        ([3, 2, 3], [0, 2]),
        ([2, 3, 3, 3], [1, 2, 3]),
        ([2, 3, 3, 2], [0, 3]),
        ([], []),
    ],
)
def test_samples_that_do_not_go_into_a_batch_are_left_out(
    lengths: list[int], kept: list[int]
) -> None:
    samples = [torch.ones(length) for length in lengths]

    batch = collated(default_collate, FetchedSamples(list(range(len(lengths))), samples))

    assert batch.indices == tuple(kept)
    assert {bad.index for bad in batch.bad} == set(range(len(lengths))) - set(kept)
    assert kept == [] or len(batch.batch) == len(kept)


@pytest.mark.parametrize(
    ("value", "total", "most"), [(3, 1000, 3), (1, 10, 1), (0.01, 1000, 10), (0.5, 3, 1)]
)
def test_bound_is_a_number_or_a_share(value: float, total: int, most: int) -> None:
    spec = JobSpec.parse({"name": "j", "task": "t:T", "epochs": 1, "max_bad_samples": value})

    assert spec.most_bad_samples(total) == most


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1%", float("nan")])
def test_other_bounds_are_refused(value: object) -> None:
    with pytest.raises(SpecError, match="max_bad_samples"):
        JobSpec.parse({"name": "j", "task": "t:T", "epochs": 1, "max_bad_samples": value})
