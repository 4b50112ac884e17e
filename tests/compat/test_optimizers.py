"""Any optimizer ends as in a plain loop, or what is approximated is said."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.compat import (
    Case,
    Points,
    assert_as_plain,
    assert_close,
    grid,
    on_workers,
    plain,
    script,
    simulated,
)
from support.harness import Harness
from torch import nn
from torch.optim import Optimizer

from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.usefixtures("one_thread")


class WithMomentum(Points):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@grid
def test_momentum(workers: int) -> None:
    assert_as_plain(Case(WithMomentum), workers)


#: The same training as a script.
SCRIPT = """
import sys
import torch
import vcasgd

sys.path.insert(0, {support!r})
from support.compat import Points

points = Points()
model = points.model()
session = vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
evaluate = session.evaluation(points.dataset("validation"))(points.evaluate)
for batch in session.batches(points.dataset("train"), batch_size=points.batch_size):
    session.step(points.loss(model, batch))
"""


@pytest.fixture
def momentum_script(tmp_path: Path) -> Path:
    script(SCRIPT.format(support=str(Path(__file__).parents[1])), tmp_path)
    return tmp_path


@grid
def test_a_script_trains_as_its_task(momentum_script: Path, workers: int) -> None:
    make_task = script((momentum_script / "train.py").read_text(), momentum_script)
    ends = simulated(make_task, workers)["loss"], simulated(WithMomentum, workers)["loss"]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


@pytest.mark.extended
def test_a_script_on_real_workers(harness: Harness, momentum_script: Path) -> None:
    metrics, job = on_workers(harness, momentum_script, "train.py", 4)

    assert job.state is JobState.SUCCEEDED, job.failure
    assert_close([metrics["loss"]], [plain(WithMomentum(), 4, seed)["loss"] for seed in (0, 1)])
