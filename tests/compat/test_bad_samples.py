"""A job that skips bad samples ends as a loop that is cautious enough to leave them out."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    Points,
    assert_as_plain,
    facts_of,
    loop_script,
    orders,
    simulated,
)
from torch import Tensor, nn
from torch.utils.data import Dataset

from vcasgd.errors import NonFiniteLoss, UserCodeError

pytestmark = pytest.mark.usefixtures("one_thread")


class InFirstBatch(Points):
    """A sample of the first batch that can't be read, and a batch that can't be divided."""

    bad = -1

    def dataset(self, split: str) -> Dataset[Any]:
        points = super().dataset(split)
        return OneIn(self.bad, points) if split == "train" else points

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * model(batch[0]).std(0).mean()


class OneIn(Dataset[Any]):
    """Points of which one can't be read."""

    def __init__(self, bad: int, points: Dataset[Any]) -> None:
        self.bad, self._points = bad, points

    def __len__(self) -> int:
        return len(self._points)

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
    loop = CAUTIOUS.format(skips=SKIPS["before backward"])
    loop = loop.replace("session.loader(data", f"session.loader(OneIn({first[3]}, data)")
    script = loop_script(tmp_path, loop, before=f"from {__name__} import OneIn")
    assert facts_of(script(), on_bad_sample="skip").min_local_batch == 2


#: A loop that leaves out batches that it finds bad, in a usual way.
CAUTIOUS = """
for batch in session.loader(data, batch_size=64):
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
            data.tensors[0][[100, 1200, 2300]] = torch.nan
        return data


@pytest.mark.parametrize("how", SKIPS)
@pytest.mark.ci
def test_a_loop_may_leave_batches_out(tmp_path: Path, how: str) -> None:
    task = loop_script(tmp_path, CAUTIOUS.format(skips=SKIPS[how]), NotNumbers)

    # As without them: three of 64 batches are left out by one worker of four.
    skips = {"on_bad_sample": "skip", "max_bad_samples": 0.05}
    assert_as_plain(task, 4, 2, twin=Points, **skips)
    with pytest.raises((UserCodeError, NonFiniteLoss)) as refused:
        simulated(task, 4, epochs=1)
    assert how == "before the step" or "on_bad_sample: skip" in (refused.value.remedy or "")


def test_a_loop_on_its_own_may_leave_batches_out(tmp_path: Path) -> None:
    for how, skips in SKIPS.items():
        loop_script(tmp_path, CAUTIOUS.format(skips=skips), NotNumbers, name=f"{how}.py")

        runpy.run_path(str(tmp_path / f"{how}.py"))
