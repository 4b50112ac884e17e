"""Parameters that the vector can't hold as they are: complex ones, and what is rounded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from support.compat import Points, assert_as_plain, facts_of, grid, on_workers, script
from support.harness import Harness
from torch import Tensor, nn
from torch.optim import Optimizer

from vcasgd.learning.layout import Layout
from vcasgd.learning.vector import gather, read_tensors
from vcasgd.storage.model_checkpoints import file_of
from vcasgd.store.ledger.job import JobState

#: A model in double precision, whose loss becomes 1e-28 with double precision only.
DOUBLE = """
import torch
import vcasgd

model = torch.nn.Linear(4, 2).double()
session = vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=0.2))
points = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)).double()
data = torch.utils.data.TensorDataset(points, points @ torch.rand(4, 2).double())

@session.evaluation(data)
def evaluate(model, batch):
    loss = (model(batch[0]) - batch[1]).square().mean()
    return {"loss": loss * len(batch[0]), "count": torch.tensor(len(batch[0]))}

for points, goals in session.batches(data, batch_size=16):
    session.step((model(points) - goals).square().mean())
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.ci
def test_double_precision_is_kept(harness: Harness, tmp_path: Path, workers: int) -> None:
    script(DOUBLE, tmp_path)
    metrics, job = on_workers(harness, tmp_path, "train.py", workers, epochs=60)

    assert job.state is JobState.SUCCEEDED, job.failure
    assert metrics["loss"] < 1e-20
    assert not harness.events(job.id, "float64-rounded")


def test_a_download_has_double_precision() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    layout = replace(Layout.of(model), doubles=("weight", "bias"), rounded="")
    floats, integers = gather(model, layout)

    def in_file(vector: Tensor) -> dict[str, Tensor]:
        return load(b"".join(file_of(layout, {}, lambda: iter(vector.split(4)), integers)))

    tensors = in_file(floats)

    assert Layout.from_json(layout.to_json()) == layout
    assert all(torch.equal(tensors[name], each) for name, each in model.state_dict().items())
    # The exact numbers are not those of an average.
    averaged = in_file(floats * 1.01)
    assert torch.equal(averaged["weight"], (floats[:6] * 1.01).view(2, 3).double())
    again = torch.zeros(layout.floats)
    assert torch.equal(read_tensors(layout, tensors, again), integers)
    assert torch.equal(again, floats)


@pytest.mark.parametrize(
    "fields",
    [{"update": {"rule": "vc-asgd"}}, {"update": {"rule": "rounds", "codec": "bfloat16"}}],
)
def test_what_rounds_a_model_in_double_precision_is_named(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    facts = facts_of(script(DOUBLE, tmp_path)(), workers=2, **fields)

    assert Layout.from_json(facts.layout).rounded == "weight"


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
@pytest.mark.ci
def test_complex_parameters_train_as_in_a_plain_loop(workers: int, task: type[Points]) -> None:
    assert_as_plain(task, workers)
