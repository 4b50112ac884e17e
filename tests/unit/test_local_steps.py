"""Gradient accumulation and mixed precision in local steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import batches, trained_on
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import vcasgd
from vcasgd.errors import NonFiniteLoss, SpecError
from vcasgd.learning.local_moments import LocalMoments
from vcasgd.learning.model_evaluation import evaluate
from vcasgd.learning.precision import MAX_SKIPPED, StepPrecision, dtype_of
from vcasgd.learning.training import micro_batches

SAMPLES = torch.linspace(-1, 1, 20 * 3).reshape(20, 3)


class Squares(vcasgd.Task):
    """A regression with batches of 8; records the size and type of each forward pass."""

    batch_size = 8
    #: Factor of the loss.
    scale = 1.0

    def __init__(self, steps: int = 1, precision: str | None = None) -> None:
        self.gradient_accumulation_steps, self.mixed_precision = steps, precision
        self.sizes: list[int] = []
        self.types: set[torch.dtype] = set()

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 2)

    def dataset(self, split: str) -> Dataset[Any]:
        return TensorDataset(SAMPLES)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        self.sizes.append(len(out))
        self.types.add(out.dtype)
        return out.float().square().mean() * self.scale

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.types.add(model(batch[0]).dtype)
        return {"count": torch.tensor(len(batch[0]))}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.Adam(parameters, lr=0.1)


def trained(task: Squares) -> tuple[Any, Tensor]:
    model = task.model()
    interval = trained_on(task, model, task.optimizer(model.parameters()), 20)
    return interval, nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_accumulated_steps_are_those_of_whole_batches(steps: int) -> None:
    """Given 20 samples, there are two steps of 8 and one of 4 samples."""
    task, clipped = Squares(steps), Squares()
    task.clip_norm = clipped.clip_norm = 0.5
    (interval, weights), (whole, expected) = trained(task), trained(clipped)
    torch.testing.assert_close(weights, expected)
    assert not torch.allclose(weights, trained(Squares())[1])
    assert (interval.samples, interval.steps) == (whole.samples, whole.steps) == (20, 3)
    assert interval.loss_sum == pytest.approx(whole.loss_sum)
    assert max(task.sizes) == -(-8 // steps)
    assert sum(task.sizes) == 20


@pytest.mark.parametrize(
    ("samples", "steps", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (8, 3, [2, 3, 3]),
        (9, 2, [3, 3, 3]),
        (3, 8, [3]),
        (4, 4, [2, 2]),
        (8, 1, [8]),
    ],
)
def test_parts(samples: int, steps: int, sizes: list[int]) -> None:
    parts = micro_batches(Squares(steps), list(range(samples)))
    assert [len(part) for part in parts] == sizes
    assert [each for part in parts for each in part] == list(range(samples))


def test_processes_that_share_a_step_have_the_same_number_of_parts() -> None:
    shares = [list(range(9)), list(range(8))]
    counts = [len(micro_batches(Squares(2), share, 8)) for share in shares]
    assert counts == [2, 2]
    assert len(micro_batches(Squares(2), shares[0])) == 3


@pytest.mark.parametrize("steps", [0, 1.5, "2"])
def test_invalid_settings(steps: Any) -> None:
    with pytest.raises(SpecError, match="gradient_accumulation_steps is"):
        batches(Squares(steps), TensorDataset(SAMPLES), np.arange(4))
    with pytest.raises(SpecError, match="mixed_precision is 'int4'"):
        dtype_of(Squares(precision="int4"))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision(name: str, dtype: torch.dtype) -> None:
    task = Squares(2, name)
    _, weights = trained(task)
    evaluate(
        *(task, task.model(), task.dataset("validation"), "cpu"),
    )
    assert task.types == {dtype}
    torch.testing.assert_close(weights, trained(Squares())[1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_skips_the_step(fused: bool) -> None:
    task = Squares(precision="fp16")
    task.scale, task.clip_norm = 5e4, 1.0
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    LocalMoments(optimizer).follow(0.5)
    precision = StepPrecision(task, "cpu")
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    interval = trained_on(task, model, optimizer, 20, precision=precision)
    assert interval.samples == 20
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
    for _ in range(8):
        trained_on(task, model, optimizer, 20, precision=precision)
    after = nn.utils.parameters_to_vector(model.parameters())
    assert torch.isfinite(after).all()
    assert not torch.equal(after, before)


class Infinite(Squares):
    """A finite loss whose gradient never is."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.sqrt(model(batch[0]) * 0).sum()


def test_gradients_that_stay_infinite() -> None:
    task = Infinite(precision="fp16")
    model = task.model()
    precision = StepPrecision(task, "cpu")
    optimizer = task.optimizer(model.parameters())
    for _ in range(MAX_SKIPPED // 3):
        trained_on(task, model, optimizer, 20, precision=precision)
    with pytest.raises(NonFiniteLoss, match=f"not finite in {MAX_SKIPPED + 1} local steps"):
        trained_on(task, model, optimizer, 20, precision=precision)


def test_session_accumulates() -> None:
    results = []
    for steps in (1, 4):
        model = Squares().model()
        session = vcasgd.Session(model, torch.optim.Adam(model.parameters(), lr=0.1))
        torch.manual_seed(1)
        sizes = []
        for (batch,) in session.batches(
            TensorDataset(SAMPLES), 8, gradient_accumulation_steps=steps
        ):
            session.step(model(batch).square().mean())
            sizes.append(len(batch))
        assert len(sizes) == (3 if steps == 1 else 10)
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*results)
