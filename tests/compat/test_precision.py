"""Parameters that the vector can't hold as they are: complex ones, and what is rounded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.compat import Case, Points, assert_as_plain, grid, on_workers, script
from support.harness import Harness
from torch import Tensor, nn
from torch.optim import Optimizer

from vcasgd.store.ledger.job import JobState

#: A model in double precision.
DOUBLE = """
import torch
import vcasgd

model = torch.nn.Linear(1, 1).double()
session = vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = [torch.ones(1, dtype=torch.float64)] * 64

@session.evaluation(data)
def evaluate(model, batch):
    return {"loss": model(batch).square().sum(), "count": torch.tensor(len(batch))}

for batch in session.batches(data, batch_size=8):
    session.step(model(batch).square().mean())
"""


def test_a_model_in_double_precision_is_noted(harness: Harness, tmp_path: Path) -> None:
    script(DOUBLE, tmp_path)
    _, job = on_workers(harness, tmp_path, "train.py", 1, epochs=1)

    assert job.state is JobState.SUCCEEDED, job.failure
    assert any(note.startswith("weight is float64") for note in job.notes), job.notes
    assert len(harness.events(job.id, "float64-rounded")) == 1


# --- complex parameters ---------------------------------------------------------------------------


class Waves(nn.Module):
    """A network with a complex layer, whose phases are a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(32, 64, dtype=torch.complex64) / 8)
        self.read = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64, dtype=torch.complex64))

    def forward(self, points: Tensor) -> Tensor:
        mixed = points.to(torch.complex64) @ self.mix
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(mixed.mean(0), 0.1)
        scores: Tensor = self.read((mixed - self.mean).abs())
        return scores


class Complex(Points):
    def model(self) -> nn.Module:
        return Waves()


class ComplexRmsProp(Complex):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-3)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("task", [Complex, ComplexRmsProp])
@grid
def test_complex_parameters_train_as_in_a_plain_loop(workers: int, task: type[Points]) -> None:
    assert_as_plain(Case(task), workers)
