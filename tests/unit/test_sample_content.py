"""Content of samples: what honest machines may differ in, and what they may not."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import vcasgd
from vcasgd.errors import DataError, StorageUnavailable
from vcasgd.learning import sample_content
from vcasgd.learning.sample_content import SampleContent

LENGTH = 100


class Samples(Dataset[Any]):
    def __init__(self, sample: Callable[[int], Any], length: int = LENGTH) -> None:
        self.sample, self.length = sample, length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.sample(index)


def task_of(loader_workers: int = 0) -> vcasgd.Task:
    task = vcasgd.Task()
    task.loader_workers = loader_workers
    return task


def content(sample: Callable[[int], Any], length: int = LENGTH, workers: int = 0) -> SampleContent:
    """Return the content as another machine gets it."""
    read = SampleContent.of(task_of(workers), Samples(sample, length), length)
    return SampleContent.from_json(read.to_json())


def image(index: int) -> Image.Image:
    waves = np.sin(np.arange(32)[:, None] * (index + 1) / 9) + np.cos(np.arange(32) * index / 7)
    return Image.fromarray(((waves + 2) * 63).astype(np.uint8))


def decoded(index: int, quality: int) -> Image.Image:
    file = io.BytesIO()
    image(index).save(file, "JPEG", quality=quality)
    return Image.open(file).convert("L")


def noise(index: int) -> Tensor:
    return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))


#: Kinds of samples by index, and the same as an honest machine may have it.
KINDS: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
    "integers": (lambda index: index, lambda index: np.int32(index)),
    "images of another decoder": (lambda n: decoded(n, 95), lambda n: decoded(n, 90)),
    "tensors of another processor": (noise, lambda n: noise(n) * (1 + 1e-5)),
    "rounded tensors": (noise, lambda n: noise(n).bfloat16()),
    "arrays": (lambda n: noise(n).numpy(), lambda n: noise(n).double().numpy()),
    "tuples": (lambda n: (noise(n), n % 10), lambda n: [noise(n), torch.tensor(n % 10)]),
    "mappings": (
        lambda n: {"pixels": noise(n), "label": n % 10, "none": None},
        lambda n: {"label": np.int64(n % 10), "none": None, "pixels": noise(n)},
    ),
    "tokens": (
        lambda n: {"ids": list(range(n, n + 50))},
        lambda n: {"ids": torch.arange(n, n + 50)},
    ),
    "text": (lambda n: f"text {n}", lambda n: f"text {n}"),
    "paths": (lambda n: f"/data/{n}.jpg", lambda n: f"/home/me/{n}.jpg"),
    "bytes": (lambda n: bytes([n]), lambda n: bytes([n])),
    "augmented images with a label": (
        lambda n: (noise(n) + torch.randn(3, 8, 8), n % 10),
        lambda n: (noise(n) + 5 * random.random() + np.random.rand(), n % 10),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_honest_machines_agree(kind: str) -> None:
    mine, other = KINDS[kind]

    assert content(mine).samples, "something is compared"
    assert content(mine).difference(content(other)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_is_found(kind: str) -> None:
    sample, _ = KINDS[kind]
    order = np.random.RandomState(0).permutation(LENGTH)

    found = content(lambda index: sample(int(order[index]))).difference(content(sample))

    assert found is not None
    assert "of 16 compared samples differ" in found


@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_a_small_data_set_is_read_whole_or_nearly(length: int) -> None:
    assert content(lambda index: index, length).samples.keys() >= {0, length - 1}
    assert content(lambda index: index, length).difference(content(lambda n: n + 1, length))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_changes_no_random_number_of_training(workers: int) -> None:
    def draw(_: int = 0) -> tuple[Any, ...]:
        return torch.rand(1), random.random(), np.random.rand()

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    drawn = draw()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)

    content(draw, workers=workers)

    assert draw() == drawn


def test_a_data_set_of_loader_processes_is_not_read_in_this_one() -> None:
    dataset = Samples(lambda index: index)

    read = SampleContent.of(task_of(1), dataset, LENGTH)

    assert len(read.samples) == 16
    assert dataset.read == []


@pytest.mark.parametrize("error", [ValueError("damaged"), DataError("damaged")])
def test_samples_that_can_not_be_read_are_left_out(error: Exception) -> None:
    def sample(index: int) -> int:
        if index == 0:
            raise error
        return index

    assert len(content(sample).samples) == 15
    assert content(sample).difference(content(lambda index: index)) is None


def test_an_unavailable_storage_is_no_content() -> None:
    def sample(_: int) -> int:
        raise StorageUnavailable("no answer")

    with pytest.raises(StorageUnavailable):
        content(sample)


def test_a_slow_data_set_is_read_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_content, "SECONDS", 0.0)

    assert len(content(lambda index: index).samples) <= 1


def test_nothing_stable_means_nothing_to_compare() -> None:
    unstable = content(lambda _: torch.rand(5))

    assert unstable.samples == {}
    assert unstable.difference(content(lambda index: index)) is None


@pytest.mark.parametrize("text", ["", "x", "[]", "3", '{"samples": {"a": 1}}', "[" * 100_000])
def test_what_a_worker_made_up_compares_nothing(text: str) -> None:
    assert content(lambda index: index).difference(SampleContent.from_json(text)) is None


def test_facts_stay_small() -> None:
    many = {str(each): torch.randn(1000) for each in range(100)}

    assert len(SampleContent.of(task_of(), Samples(lambda _: many), LENGTH).to_json()) < 50_000
