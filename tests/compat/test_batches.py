"""Batches that can't be divided among all workers end as in a plain loop, on fewer workers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.compat import Case, Points, assert_as_plain, grid, on_workers, script
from support.harness import Harness
from torch import nn
from torch.optim import Optimizer

from vcasgd.learning.batch_probe import division_of
from vcasgd.learning.local_batch import LocalBatch
from vcasgd.learning.whole_batches import Division, most_workers
from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.usefixtures("one_thread")


class FewPoints(Points):
    samples = 1024


class SingleSamples(FewPoints):
    batch_size = 1
    samples = 512

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.02)


class Normalized(FewPoints):
    batch_size = 16

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.features, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, self.classes)
        )


class LargeNormalized(Normalized):
    batch_size, samples = 64, 4096


@grid
def test_single_samples(workers: int) -> None:
    assert_as_plain(Case(SingleSamples, epochs=1), workers)


@grid
def test_small_batches_that_are_normalized(workers: int) -> None:
    assert_as_plain(Case(Normalized), workers)


@grid
def test_large_batches_that_are_normalized(workers: int) -> None:
    assert_as_plain(Case(LargeNormalized), workers)


class Frozen(Normalized):
    """A model whose BatchNorm only applies its running statistics."""

    def model(self) -> nn.Module:
        model = super().model()
        model[1].eval()  # type: ignore[index]
        return model


class Declared(Normalized):
    min_local_batch = 8


@pytest.mark.parametrize(
    ("task", "least", "workers"),
    [(SingleSamples(), 1, 1), (Points(), 2, 32), (Frozen(), 2, 8), (Normalized(), 16, 1),
     (LargeNormalized(), 16, 4), (Declared(), 8, 2)],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_how_many_workers_share_a_batch(task: Points, least: int, workers: int) -> None:
    division = division_of(task, task.model())

    assert division.least == least
    assert most_workers(task.batch_size, division.least) == workers


def test_a_part_is_never_smaller_than_it_may_be() -> None:
    batch = LocalBatch(64, 8, least=16)
    assert batch.size == 16

    batch.measure(10.0)
    batch.follow(1, 8, 128.0, 0.1)
    assert batch.size == 16


def test_a_reason_is_for_people() -> None:
    assert division_of(Normalized(), Normalized().model()) == Division(
        16, "BatchNorm1d 1 normalizes over the batch"
    )


#: A task in a job file.
TASK = """
import sys

sys.path.insert(0, {support!r})
from compat.test_batches import Normalized
"""


@pytest.mark.slow
def test_idle_workers_are_named(harness: Harness, tmp_path: Path) -> None:
    script(TASK.format(support=str(Path(__file__).parents[1])), tmp_path)

    _, job = on_workers(harness, tmp_path, "train:Normalized", 2, epochs=2)

    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.totals["samples"] == 2 * Normalized.samples
    why = "a part of a batch of 16 samples needs at least 16, because BatchNorm1d 1 normalizes"
    assert job.notes == (f"1 of 2 workers have work: {why} over the batch",)
    (event,) = harness.events(job.id, "batch-undivided")
    assert event["text"] == job.notes[0]
