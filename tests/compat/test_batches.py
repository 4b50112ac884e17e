"""Batches that can't be divided among all workers end as in a plain loop, on fewer workers."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    SESSION_STEPS,
    ByLoss,
    FewPoints,
    Points,
    assert_as_plain,
    grid,
    learner_of,
    loop_script,
    on_workers,
    own_steps,
    plain,
    script,
    simulated,
)
from support.harness import Harness
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.learning.batch_probe import division_of, probed
from vcasgd.learning.local_batch import LocalBatch, most_workers
from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.usefixtures("one_thread")


class SingleSamples(FewPoints):
    batch_size = 1
    samples = 256

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.02)


class Normalized(FewPoints):
    batch_size = 16

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.features, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, self.classes)
        )


class Written(Normalized):
    """Adds a digest of the model before each step to a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        state = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
        with self.path.open("a") as file:
            file.write(f"{sha256(state).hexdigest()}\n")
        return super().loss(model, batch)


class LargeNormalized(Normalized):
    batch_size, samples = 64, 4096


@grid
def test_single_samples(workers: int) -> None:
    assert_as_plain(SingleSamples, workers, 1)


@grid
def test_small_batches_that_are_normalized(workers: int) -> None:
    assert_as_plain(Normalized, workers)


class Contrastive(ByLoss):
    """A model that recognizes a point among the others of its batch, after small changes."""

    samples = 1024
    batch_size = 128

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.features, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, _ = batch
        changed = torch.stack([points + torch.sin(7 * points), points - torch.cos(9 * points)])
        first, second = F.normalize(model(changed), dim=-1)
        return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(points)))


class Overlap(ByLoss):
    """A model of one class, with the Dice loss of whole batches."""

    samples = 1024
    batch_size = 32

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        found, there = model(points).softmax(1)[:, 3], (labels == 3).float()
        return 1 - (2 * (found * there).sum() + 1) / (found.sum() + there.sum() + 1)


@grid
def test_losses_over_pairs_of_samples(workers: int) -> None:
    assert_as_plain(Contrastive, workers)


@grid
def test_losses_of_whole_batches(workers: int) -> None:
    assert_as_plain(Overlap, workers)


class Summed(FewPoints):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * len(batch[0])


class SummedPlainly(Summed):
    """A sum over samples, by an optimizer that follows the size of its gradient."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1 / self.batch_size, momentum=0.9)


class AveragedPlainly(FewPoints):
    """The mean that makes the same steps."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("loop", [None, SESSION_STEPS, own_steps()])
def test_workers_share_sums_over_samples(tmp_path: Path, loop: str | None) -> None:
    expected = simulated(AveragedPlainly, 4, epochs=2)["loss"]
    task = loop_script(tmp_path, loop, SummedPlainly) if loop else SummedPlainly

    assert simulated(task, 4, epochs=2)["loss"] == pytest.approx(expected, rel=1e-3)


class SomeOfThem(FewPoints):
    """A second output that only some of the samples have a target for, and that is small at first,
    as of a task whose labels are incomplete."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.normal_(model[2].weight[:2], std=1e-3)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, _ = batch
        known, targets = points[:, 0] > 0, 0.1 + 0.02 * points[:, 1]
        return super().loss(model, batch) + F.mse_loss(model(points)[known, 0], targets[known])


class Noisy(FewPoints):
    """A loss with random numbers: of dropout, as a layer and as a function, and of noise."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), nn.Dropout(0.2))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        answers = model(points + 0.5 * torch.randn_like(points))
        return F.cross_entropy(F.dropout(answers, 0.2), labels)


class Augmenting(Dataset[Any]):
    """Samples with other noise each time."""

    def __init__(self, points: Any) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        point, label = self.points[index]
        return {"point": point + 0.5 * torch.randn_like(point), "label": label}


class Augmented(FewPoints):
    """Data that is augmented, and a collator that takes its samples apart."""

    def dataset(self, split: str) -> Dataset[Any]:
        return Augmenting(super().dataset(split))

    def collate(self, samples: list[Any]) -> Any:
        labels = torch.stack([each.pop("label") for each in samples])
        return torch.stack([each["point"] for each in samples]), labels


class Masked(FewPoints):
    """A collator that masks other numbers each time."""

    def collate(self, samples: list[Any]) -> Any:
        points, labels = super().collate(samples)
        return points * (torch.rand_like(points) > 0.15), labels


class NoisyAverages(FewPoints):
    """An autoencoder with random codes, most of whose gradient is noise."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.features, 8), nn.Linear(4, self.features))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        encoder, decoder = model.children()
        mean, deviation = encoder(batch[0]).chunk(2, -1)
        code = mean + deviation.exp() * torch.randn_like(mean)
        divergence = (mean.square() + (2 * deviation).exp() - 2 * deviation).sum(1).mean() / 2
        loss: Tensor = F.mse_loss(decoder(code), batch[0]) + 0.1 * divergence
        return loss


class NoisySums(NoisyAverages):
    """An autoencoder as its usual examples have it."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * len(batch[0])


class Views(Contrastive):
    """VICReg (arXiv:2105.04906) with noise, which hides what the loss needs."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, _ = batch
        views = [model(points + 0.5 * torch.randn_like(points)) for _ in range(2)]
        apart = sum(F.relu(1 - (view.var(0) + 1e-4).sqrt()).mean() for view in views)
        mixed = sum((torch.cov(view.T).square().sum() - view.var(0).square().sum()) / 16
                    for view in views)  # fmt: skip
        return 25 * F.mse_loss(*views) + 25 * apart + mixed


class WholeOnly(FewPoints):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (torch.ones(64) + batch[1])[0] / (1 + batch[1][0])


class Warming(FewPoints):
    """A loss whose weight grows with each of its calls."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) * min(1.0, self.calls / 50)


class Failing(FewPoints):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("for the training to report")


class Zeros(FewPoints):
    """A layer that starts with zeros, so that all losses are equal at first."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.zeros_(model[2].weight)
        return model


@pytest.mark.parametrize(
    ("task", "least", "why"),
    [
        (FewPoints(), 2, ""),
        (Normalized(), 16, "BatchNorm1d 1 normalizes over the batch"),
        (Noisy(), 2, ""),
        (NoisyAverages(), 2, ""),
        (Augmented(), 2, ""),
        (Masked(), 2, ""),
        (Warming(), 2, ""),
        (Zeros(), 2, ""),
        (Failing(), 2, ""),
        (Contrastive(), 128, "its loss isn't a mean over samples: "),
        (Views(), 128, "the gradient of its first batch isn't the mean of those of its parts"),
        (Overlap(), 32, "its loss isn't a mean over samples: "),
        (Summed(), 64, "its loss is a sum over samples; divide it by their number"),
        (NoisySums(), 64, "its loss is a sum over samples; divide it by their number"),
        (WholeOnly(), 64, "its loss needs whole batches: RuntimeError: "),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Points) else "",
)
def test_what_a_loss_needs_is_measured(task: Points, least: int, why: str) -> None:
    torch.manual_seed(0)
    model, data = task.model(), task.dataset("train")
    before = {name: each.clone() for name, each in model.state_dict().items()}
    random = torch.get_rng_state()

    division = probed(task, model, data, range(task.batch_size), "cpu")

    assert division.least == least
    assert division.why.startswith(why)
    assert bool(division.why) == bool(why)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(each.training for each in model.modules())
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])


@pytest.mark.parametrize("loop", [SESSION_STEPS, own_steps()], ids=["session", "own-steps"])
@pytest.mark.parametrize("task", [Contrastive, SomeOfThem, Summed, WholeOnly, FewPoints])
def test_what_the_loss_of_a_script_needs_is_measured(
    tmp_path: Path, task: type[Points], loop: str
) -> None:
    make_task = loop_script(tmp_path, loop, task)
    learner = learner_of(make_task(), epochs=2)
    before = learner.initial()[0]

    facts = learner.facts(1)

    assert facts.min_local_batch == (2 if task in (FewPoints, Summed) else task.batch_size)
    assert torch.equal(learner.initial()[0], before)
    if task is Contrastive:
        # One of the workers trains, exactly as a loop.
        end = simulated(make_task, 4, epochs=2)["loss"]
        assert end == pytest.approx(plain(task(), 2, 0)["loss"], rel=1e-5)


class Frozen(Normalized):
    """A model whose BatchNorm only applies its running statistics."""

    def model(self) -> nn.Module:
        model = super().model()
        model[1].eval()
        return model


class Declared(Normalized):
    min_local_batch = 8


@pytest.mark.parametrize(
    ("task", "least", "workers"),
    [
        (SingleSamples(), 1, 1),
        (Points(), 2, 32),
        (Frozen(), 2, 8),
        (Normalized(), 16, 1),
        (LargeNormalized(), 16, 4),
        (Declared(), 8, 2),
    ],
    ids=lambda each: type(each).__name__,
)
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


@pytest.mark.ci
def test_a_worker_that_is_alone_makes_the_steps_of_a_plain_loop(
    harness: Harness, tmp_path: Path
) -> None:
    """Bit by bit, with the statistics of batches and with Adam's moments."""
    script(f"import torch; torch.set_num_threads(1); from {__name__} import Written", tmp_path)
    plainly, path = tmp_path / "plainly", tmp_path / "worker"
    expected = plain(Written(str(plainly)), 4, 0)["loss"]

    metrics, job = on_workers(harness, tmp_path, "train:Written", 1, args={"path": str(path)})

    assert job.state is JobState.SUCCEEDED, job.reason
    steps = plainly.read_text().split()
    # Before them, the worker looks at a few batches.
    assert path.read_text().split()[-len(steps) :] == steps
    # Differences that are pushed are rounded.
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.extended
@pytest.mark.slow
def test_idle_workers_are_named(harness: Harness, tmp_path: Path) -> None:
    script(f"from {__name__} import Normalized", tmp_path)

    _, job = on_workers(harness, tmp_path, "train:Normalized", 2, epochs=2)

    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.totals["samples"] == 2 * Normalized.samples
    why = "a part of a batch of 16 samples needs at least 16, because BatchNorm1d 1 normalizes"
    assert job.notes == (
        f"1 of 2 workers have work: {why} over the batch; min_local_batch sets another size",
    )
    (event,) = harness.events(job.id, "batch-undivided")
    assert event["text"] == job.notes[0]
