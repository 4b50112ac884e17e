"""A job that skips bad samples ends as a loop that is cautious enough to leave them out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.compat import Case, Metrics, Points, assert_as_plain, grid, plain
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

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
