"""Buffers end as in a plain loop, whatever they are: statistics, counters, masks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.compat import (
    SESSION_STEPS,
    ByLoss,
    Points,
    assert_as_plain,
    assert_close,
    facts_of,
    grid,
    kinds_of,
    loop_script,
    plain,
    simulated,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.errors import SpecError
from vcasgd.learning.layout import TensorKind
from vcasgd.worker import trial_steps

pytestmark = pytest.mark.usefixtures("one_thread")


class WithMask(nn.Module):
    """A network that mixes its inputs by attention under a causal mask."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.read = nn.Linear(features, 64)
        self.write = nn.Linear(64, classes)
        self.scores = nn.Parameter(torch.zeros(64, 64))
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))

    def forward(self, points: Tensor) -> Tensor:
        mixed = torch.softmax(self.scores + self.mask, 1)
        answers: Tensor = self.write(torch.relu(self.read(points)) @ mixed.T)
        return answers


class Masked(Points):
    samples = 1024

    def model(self) -> nn.Module:
        return WithMask(self.features, self.classes)


@grid
def test_a_mask_with_infinite_values(workers: int) -> None:
    assert_as_plain(Masked, workers)


class Extremes(WithMask):
    def forward(self, points: Tensor) -> Tensor:
        self.mask.clamp_(min=-5.0)
        return super().forward(points)


class ChangesItsMask(Masked):
    def model(self) -> nn.Module:
        return Extremes(self.features, self.classes)


def test_infinite_values_that_change_are_refused() -> None:
    with pytest.raises(SpecError, match="mask of the model starts with values that aren't finite"):
        simulated(ChangesItsMask, 2)


# --- buffers that forward passes change -----------------------------------------------------------


class Net(nn.Module):
    """A network with the buffers of a test."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.net(points)
        return scores


class Counting(ByLoss):
    """Logits are adjusted by the labels that were counted (Menon et al. 2021)."""

    dtype = torch.int64

    def model(self) -> nn.Module:
        return Net(counts=torch.ones(10, dtype=self.dtype), seen=torch.tensor(0.0))

    def loss(self, model: Any, batch: Any) -> Tensor:
        points, labels = batch
        if model.training:
            model.counts += torch.bincount(labels, minlength=10).to(self.dtype)
            model.seen += len(labels)
        prior = (model.counts / model.counts.sum()).log()
        return F.cross_entropy(model(points) + prior, labels)

    def kept(self, model: Any) -> dict[str, Tensor]:
        return {"counted": model.counts.sum(), "seen": model.seen}


class CountingFloats(Counting):
    dtype = torch.float32


@pytest.mark.parametrize("task", [Counting, CountingFloats])
@grid
@pytest.mark.ci
def test_counters_have_what_all_workers_count(workers: int, task: type[Counting]) -> None:
    ends = simulated(task, workers, epochs=4)

    assert (ends["counted"], ends["seen"]) == (4 * 4096 + 10, 4 * 4096)
    assert_close([ends["loss"]], [plain(task(), 4, 0)["loss"]])


def test_a_worker_that_is_alone_counts_in_overlapping_steps_too() -> None:
    ends = simulated(Counting, 1, epochs=4)

    assert (ends["counted"], ends["seen"]) == (4 * 4096 + 10, 4 * 4096)


@grid
def test_counters_of_a_script(tmp_path: Path, workers: int) -> None:
    ends = simulated(loop_script(tmp_path, SESSION_STEPS, Counting), workers, epochs=1)

    assert (ends["counted"], ends["seen"]) == (4096 + 10, 4096)


class Ranged(ByLoss):
    """Inputs are scaled by the largest that there were."""

    def model(self) -> nn.Module:
        return Net(largest=torch.tensor(0.5))

    def loss(self, model: Any, batch: Any) -> Tensor:
        points, labels = batch
        if model.training:
            torch.maximum(model.largest, points.abs().max(), out=model.largest)
        return F.cross_entropy(model(points / model.largest), labels)

    def kept(self, model: Any) -> dict[str, Tensor]:
        return {"largest": model.largest}


@pytest.mark.ci
@grid
def test_ranges_are_those_of_all_workers(workers: int) -> None:
    ends, twin = simulated(Ranged, workers), plain(Ranged(), 4, 0)

    assert ends["largest"] == twin["largest"]
    assert_close([ends["loss"]], [twin["loss"]])


class WithCentre(ByLoss):
    """Scores are centred by their running mean, as the teacher's in DINO."""

    def model(self) -> nn.Module:
        return Net(centre=torch.zeros(10))

    def loss(self, model: Any, batch: Any) -> Tensor:
        points, labels = batch
        scores = model(points)
        if model.training:
            with torch.no_grad():
                model.centre.mul_(0.9).add_(scores.mean(0), alpha=0.1)
        return F.cross_entropy(scores - model.centre, labels)


class Spectral(Points):
    """Spectral norm in each layer, whose power iterations are buffers."""

    def model(self) -> nn.Module:
        norm = torch.nn.utils.parametrizations.spectral_norm
        layers = nn.Linear(self.features, 64), nn.ReLU(), nn.Linear(64, self.classes)
        return nn.Sequential(norm(layers[0]), layers[1], norm(layers[2]))

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        shortest = min(float(each.norm()) for each in model.buffers())
        length = torch.tensor(shortest * len(batch[1]))
        return super().evaluate(model, batch) | {"length": length}


class FusedSpectral(Spectral):
    """The same with an optimizer whose steps leave the versions of tensors alone."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


class Quantized(ByLoss):
    """Features are quantized by a codebook of moving averages (van den Oord et al. 2017)."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        codes = torch.randn(32, 32)
        net = Net(codes=codes, sizes=torch.zeros(32), sums=codes.clone())
        net.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        return net

    def loss(self, model: Any, batch: Any) -> Tensor:
        points, labels = batch
        nearest = torch.cdist(points, model.codes).argmin(1)
        if model.training:
            hits = F.one_hot(nearest, 32).float()
            model.sizes.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            model.sums.mul_(0.9).add_(hits.T @ points, alpha=0.1)
            model.codes.copy_(model.sums / (model.sizes + 1e-2)[:, None])
        features = torch.cat([points, model.codes[nearest]], 1)
        return F.cross_entropy(model(features), labels)


class Queued(ByLoss):
    """Scores are compared with those of samples before, in a queue as MoCo's (He et al. 2020)."""

    def model(self) -> nn.Module:
        net = Net(queue=torch.zeros(256, 10), at=torch.tensor(0))
        torch.manual_seed(0)
        net.queue.normal_()
        return net

    def loss(self, model: Any, batch: Any) -> Tensor:
        points, labels = batch
        scores = model(points)
        spread = -(scores @ model.queue.clone().T).square().mean() * 1e-3
        if model.training:
            with torch.no_grad():
                places = (model.at + torch.arange(len(points))) % 256
                model.queue[places] = scores
                model.at.copy_((model.at + len(points)) % 256)
        return F.cross_entropy(scores, labels) - spread

    def kept(self, model: Any) -> dict[str, Tensor]:
        return {"at": model.at}


@pytest.mark.parametrize("task", [WithCentre, Spectral, Quantized, Queued])
@grid
@pytest.mark.ci
def test_buffers_of_a_forward_pass(workers: int, task: type[Points]) -> None:
    assert_as_plain(task, workers, 2)


def test_a_version_has_directions_and_not_their_mean() -> None:
    assert simulated(Spectral, 4, epochs=1)["length"] == pytest.approx(1, abs=1e-5)


def test_the_mean_of_too_many_directions_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "buffers-averaged" not in facts_of(Spectral()).notes
    monkeypatch.setattr(trial_steps, "MAX_DIRECTIONS", 100)

    assert "._u" in facts_of(Spectral()).notes["buffers-averaged"]


@pytest.mark.parametrize(
    ("task", "names"),
    [
        *[(Queued, "queue"), (Quantized, "sizes"), (WithCentre, "")],
        *[(Spectral, ""), (FusedSpectral, "")],
    ],
)
def test_buffers_of_whole_batches_leave_one_worker(task: type[Points], names: str) -> None:
    facts = facts_of(task())

    assert names in facts.min_local_batch_why
    assert facts.min_local_batch == (64 if names else 2)


class Shifted(Dataset[Any]):
    """Points whose features are moved by random numbers and mirrored, in another way each time."""

    def __init__(self, points: Dataset[Any]) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        point, label = self.points[index]
        return point.roll(random.randrange(32)) * random.choice([-1, 1]), label


class Augmented(Points):
    """A task whose model keeps the largest of its inputs, and the sum of their squares."""

    def model(self) -> nn.Module:
        return Net(peak=torch.zeros(32), power=torch.zeros(32))

    def dataset(self, split: str) -> Dataset[Any]:
        return Shifted(super().dataset(split))

    def loss(self, model: Any, batch: Any) -> Tensor:
        model.peak.copy_(torch.maximum(model.peak, batch[0].amax(0)))
        model.power += batch[0].square().sum(0)
        return super().loss(model, batch)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_buffers_are_observed_on_the_same_augmented_samples(accumulated: int) -> None:
    task = Augmented()
    task.gradient_accumulation_steps = accumulated

    facts = facts_of(task)

    kinds = kinds_of(facts)
    assert (kinds["peak"], kinds["power"]) == (TensorKind.MAX, TensorKind.SUM)
    assert facts.min_local_batch == 2


def test_a_pointer_that_starts_again_outlives_its_worker() -> None:
    assert simulated(Queued, 1, epochs=1)["at"] == plain(Queued(), 1, 0)["at"]


def test_the_task_says_how_buffers_are_merged() -> None:
    class Declared(Queued):
        buffers: ClassVar = {"queue": "mean", "a*": "latest"}

    facts = facts_of(Declared())

    kinds = kinds_of(facts)
    assert (kinds["queue"], kinds["at"]) == (TensorKind.STATISTIC, TensorKind.LATEST)
    assert facts.min_local_batch == 2


@pytest.mark.parametrize(
    ("buffers", "why"),
    [
        ({"queues": "mean"}, "the model has no persistent buffer queues"),
        ({"queue": "median"}, "queue can't be merged by 'median'"),
        ({"at": "mean"}, "at can't be merged by 'mean'"),
    ],
)
def test_an_impossible_policy_is_refused(buffers: dict[str, str], why: str) -> None:
    task = Queued()
    task.buffers = buffers

    with pytest.raises(SpecError, match=why):
        facts_of(task)


def test_a_session_says_how_buffers_are_merged(tmp_path: Path) -> None:
    buffers = 'optimizer, buffers={"counts": "max", "seen": "max"}'

    kinds = kinds_of(facts_of(loop_script(tmp_path, SESSION_STEPS, Counting, session=buffers)()))

    assert (kinds["counts"], kinds["seen"]) == (TensorKind.INTEGER, TensorKind.MAX)
