"""A job that skips bad samples ends as a loop that is cautious enough to leave them out."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.test_buffers import facts_of
from support.compat import (
    SEEDS,
    Case,
    Metrics,
    Points,
    assert_as_plain,
    assert_close,
    grid,
    orders,
    plain,
    script,
    simulated,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.errors import NonFiniteLoss, UserCodeError

pytestmark = pytest.mark.usefixtures("one_thread")


class Damaged(Dataset[Any]):
    """Points of which one in 256 can't be read, and one is not a number."""

    def __init__(self, points: Dataset[Any], *, good: bool) -> None:
        self._points, self._good = points, good

    def __len__(self) -> int:
        return len(self._points)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        point, label = self._points[index]
        if index % 256 == 7 and not self._good:
            raise OSError("truncated image")
        return point * torch.nan if index % 256 in (7, 100) else point, label


class WithDamage(Points):
    good = False

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def dataset(self, split: str) -> Dataset[Any]:
        points = super().dataset(split)
        return Damaged(points, good=self.good) if split == "train" else points


class Cautious(WithDamage):
    """The plain twin, whose loss leaves the bad samples out."""

    good = True

    def loss(self, model: Any, batch: Any) -> Tensor:
        sound = batch[0].isfinite().all(1)
        return super().loss(model, [part[sound] for part in batch])


def cautious(seed: int) -> Metrics:
    return plain(Cautious(), 2, seed)


@grid
def test_bad_samples_are_left_out(workers: int) -> None:
    skips = {"on_bad_sample": "skip", "max_bad_samples": 0.02}

    assert_as_plain(Case(WithDamage, epochs=2, twin=cautious, fields=skips), workers)


class InFirstBatch(WithDamage):
    """Damage that the first worker meets before it trains, and a batch that can't be divided."""

    def dataset(self, split: str) -> Dataset[Any]:
        points = super(WithDamage, self).dataset(split)
        return OneIn(self.bad, points) if split == "train" else points

    bad = -1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * model(batch[0]).std(0).mean()


class OneIn(Dataset[Any]):
    """Points of which one can't be read."""

    def __init__(self, bad: int, points: Dataset[Any]) -> None:
        self.bad, self._points = bad, points

    def __len__(self) -> int:
        return len(self._points)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("truncated image")
        return self._points[index]


def test_the_first_batch_is_measured_without_its_bad_samples(tmp_path: Path) -> None:
    first = next(iter(orders(InFirstBatch.samples, 1, 0, InFirstBatch.batch_size)))
    task = InFirstBatch()
    task.bad = first[3]

    facts = facts_of(task, on_bad_sample="skip")

    # Its loss is no mean over samples.
    assert facts.min_local_batch == task.batch_size
    # And a loop, whose batches are weighed beforehand, starts.
    source = CAUTIOUS.format(tests=str(Path(__file__).parents[1]), skips=SKIPS["before backward"])
    source = source.replace("NotNumbers", "OneBad").replace("OneBad()", f"OneBad({first[3]})")
    assert facts_of(script(source, tmp_path)(), on_bad_sample="skip").min_local_batch == 2


class OneBad(Points):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def dataset(self, split: str) -> Dataset[Any]:
        points = super().dataset(split)
        return OneIn(self.bad, points) if split == "train" else points


#: A loop that leaves out batches that it finds bad, in a usual way.
CAUTIOUS = """
import sys

import torch
import vcasgd

sys.path.insert(0, {tests!r})
from compat.test_bad_samples import NotNumbers

task = NotNumbers()
model = task.model()
optimizer = task.optimizer(model.parameters())
session = vcasgd.Session(model, optimizer)
session.evaluation(task.dataset("validation"))(task.evaluate)
for batch in session.loader(task.dataset("train"), batch_size=64):
    loss = task.loss(model, batch)
    {skips}
"""
SKIPS = {
    "before backward": """if not loss.isfinite():
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()""",
    "before the step": """optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
    if norm.isfinite():
        optimizer.step()""",
}


class NotNumbers(Points):
    """Points of which three aren't numbers."""

    def dataset(self, split: str) -> Dataset[Any]:
        data = super().dataset(split)
        if split == "train":
            data.tensors[0][[100, 1200, 2300]] = torch.nan  # type: ignore[attr-defined]
        return data


@pytest.mark.parametrize("how", SKIPS)
@pytest.mark.ci
def test_a_loop_may_leave_batches_out(tmp_path: Path, how: str) -> None:
    source = CAUTIOUS.format(tests=str(Path(__file__).parents[1]), skips=SKIPS[how])
    task = script(source, tmp_path)

    ends = [
        simulated(task, 4, seed, epochs=2, on_bad_sample="skip", max_bad_samples=0.05)["loss"]
        for seed in SEEDS
    ]

    # As without them: three of 64 batches are left out by one worker of four.
    assert_close(ends, [plain(Points(), 2, seed)["loss"] for seed in SEEDS])
    with pytest.raises((UserCodeError, NonFiniteLoss)) as refused:
        simulated(task, 4, epochs=1)
    assert how == "before the step" or "on_bad_sample: skip" in (refused.value.remedy or "")


def test_a_loop_on_its_own_may_leave_batches_out(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    for how, skips in SKIPS.items():
        script(CAUTIOUS.format(tests=tests, skips=skips), tmp_path, f"{how}.py")

        runpy.run_path(str(tmp_path / f"{how}.py"))
