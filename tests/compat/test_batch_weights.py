"""Losses that are means over tokens or labels end as in a plain loop, and no label is no error."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    ByLoss,
    Metrics,
    Points,
    assert_as_plain,
    evaluate_plainly,
    facts_of,
    grid,
    loop_script,
    orders,
    own_steps,
    plain,
    simulated,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import vcasgd
from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.batch_probe import probed
from vcasgd.learning.batch_weights import BatchWeights, CountedLabels

pytestmark = pytest.mark.usefixtures("one_thread")

#: A label that doesn't count, as in torch and transformers.
NONE = -100
WORDS = 32


class Texts(Dataset[Tensor]):
    """Texts of a Markov chain, of ``shortest`` to ``longest`` words."""

    def __init__(self, count: int, seed: int, shortest: int, longest: int) -> None:
        chain = torch.Generator().manual_seed(1)
        after = torch.softmax(2 * torch.randn(WORDS, WORDS, generator=chain), 1)
        own = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(shortest, longest + 1, (count,), generator=own).tolist()
        words = [torch.randint(WORDS, (count,), generator=own)]
        for _ in range(longest - 1):
            words.append(torch.multinomial(after[words[-1]], 1, generator=own)[:, 0])
        self.words = torch.stack(words, 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return self.words[index, : self.lengths[index]]


class MeanOverTokens(vcasgd.Task):
    """Predict the next word, with the mean over all words of a batch."""

    batch_size = 16
    shortest, longest = 4, 64

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 32), nn.ReLU(), nn.Linear(32, WORDS))

    def dataset(self, split: str) -> Dataset[Tensor]:
        train = split == "train"
        return Texts(512 if train else 256, 2 if train else 3, self.shortest, self.longest)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        words = torch.zeros(len(samples), max(map(len, samples)), dtype=torch.int64)
        labels = torch.full_like(words, NONE)
        for row, sample in enumerate(samples):
            words[row, : len(sample)] = sample
            labels[row, : len(sample) - 1] = sample[1:]
        return words, labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        words, labels = batch
        return F.cross_entropy(model(words).flatten(0, 1), labels.flatten(), ignore_index=NONE)

    def batch_weight(self, batch: Any) -> Tensor:
        return (batch[1] != NONE).sum()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.Adam(parameters, lr=5e-3)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        weight = self.batch_weight(batch)
        return {"loss": self.loss(model, batch) * weight, "count": weight}


class FewLabels(MeanOverTokens):
    """Most words have no label, so most parts of a batch have none at all."""

    shortest = longest = 8

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        words, labels = super().collate(samples)
        chosen = (words * 7919 + torch.arange(words.shape[1]) * 104729) % 97 < 4
        return words, labels.where(chosen, torch.full_like(labels, NONE))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)


@grid
def test_parts_without_a_label(workers: int) -> None:
    assert_as_plain(FewLabels, workers, loop=accumulated)


class Undeclared(MeanOverTokens):
    def batch_weight(self, batch: Any) -> None:
        return None

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        weight = (batch[1] != NONE).sum()
        return {"loss": self.loss(model, batch) * weight, "count": weight}


class UndeclaredLabels(Undeclared, FewLabels):
    pass


@pytest.mark.ci
@grid
def test_labels_that_are_found(workers: int) -> None:
    assert_as_plain(Undeclared, workers)


def test_which_labels_are_found() -> None:
    for task in (Undeclared(), UndeclaredLabels()):
        division = probed(task, task.model(), task.dataset("train"), range(16), "cpu")
        assert division.labels is not None
        assert str(division.labels) == "numbers other than -100 in batch[1]"
        assert division.labels == CountedLabels.from_json(division.labels.to_json())


class Weighted(ByLoss):
    """Classes that count as much as the task's own weights say."""

    def __init__(self) -> None:
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 5, self.classes))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        answers, labels = model(batch[0]), batch[1]
        loss: Tensor = self.criterion(answers, labels)
        return loss

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Void(ByLoss):
    """Labels of which one doesn't count, as in segmentation."""

    void = 255

    def dataset(self, split: str) -> Any:
        points, labels = super().dataset(split).tensors
        return TensorDataset(points, labels.masked_fill(points[:, 0] > 0.3, self.void))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=self.void)


class VoidOfWeights(Void):
    """The same, with other weights in each call, which have the same values."""

    void = -1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        answers = F.log_softmax(model(batch[0]), 1)
        weights = torch.linspace(0.1, 5, self.classes)
        return F.nll_loss(answers, batch[1], weights, ignore_index=self.void)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Weighted, "numbers other than -100 in batch[1], by the weights of their classes"),
        (Void, "numbers other than 255 in batch[1]"),
        (VoidOfWeights, "numbers other than -1 in batch[1], by the weights of their classes"),
    ],
)
def test_classes_that_a_loss_weighs_are_found(task: type[Points], text: str) -> None:
    torch.manual_seed(0)
    division = probed(task(), task().model(), task().dataset("train"), range(64), "cpu")

    assert division.least == 2
    assert str(division.labels) == text
    assert division.labels is not None
    assert division.labels == CountedLabels.from_json(division.labels.to_json())


@pytest.mark.parametrize("loop", [None, own_steps()])
def test_workers_share_losses_with_weights_of_classes(tmp_path: Path, loop: str | None) -> None:
    task = loop_script(tmp_path, loop, Weighted) if loop else Weighted

    assert facts_of(task()).min_local_batch == 2
    expected = plain(Weighted(), 1, 0)["loss"]
    assert simulated(task, 4, epochs=1)["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '[["a"], "by heart"]', '[[1.5], "added up"]', "{}", '[[], "other than 1", [-1]]'],
)
def test_labels_that_no_worker_found(text: str) -> None:
    with pytest.raises(SpecError, match="labels that can't be read"):
        CountedLabels.from_json(text)


class Accumulated(MeanOverTokens):
    gradient_accumulation_steps = 4


def accumulated(
    task: MeanOverTokens,
    model: nn.Module,
    optimizer: Optimizer,
    epochs: int,
    seed: int,
    parts: int = 1,
) -> Metrics:
    """Train as a loop that divides the sum of the losses of a step by its number of labels."""
    data = task.dataset("train")
    for indices in orders(len(data), epochs, seed, task.batch_size):
        size = -(-len(indices) // parts)
        cuts = range(0, len(indices), size)
        batches = [task.collate([data[at] for at in indices[cut : cut + size]]) for cut in cuts]
        weights = [int(task.batch_weight(batch)) for batch in batches]
        optimizer.zero_grad()
        for batch, weight in zip(batches, weights, strict=True):
            if weight:
                (task.loss(model, batch) * weight / sum(weights)).backward()
        if sum(weights):
            optimizer.step()
    return evaluate_plainly(task, model)


in_four_parts = partial(accumulated, parts=4)


def test_a_single_worker_trains_exactly_as_a_loop() -> None:
    plainly = plain(Accumulated(), 4, 0, in_four_parts)["loss"]

    assert simulated(Accumulated, 1)["loss"] == pytest.approx(plainly, rel=1e-4)


#: The same training as scripts, whose session makes the steps, or whose loop does.
STEPS = """
for batch in session.batches(
    DataLoader(data, 16, collate_fn=task.collate), gradient_accumulation_steps=4
):
    session.step(task.loss(model, batch))
"""
LOOP = """
loader = session.loader(
    DataLoader(data, 4, collate_fn=task.collate), gradient_accumulation_steps=4
)
for batch in loader:
    (task.loss(model, batch) / 4).backward()
    if loader.ends_step:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("loop", [STEPS, LOOP], ids=["session", "own-steps"])
@pytest.mark.ci
def test_scripts(tmp_path: Path, loop: str) -> None:
    weighs = "optimizer, batch_weight=task.batch_weight"
    make_task = loop_script(tmp_path, loop, Accumulated, session=weighs)

    assert_as_plain(make_task, 4, twin=Accumulated, loop=in_four_parts, seeds=(0,))


#: A loop without accumulation, whose labels are found.
FOUND = own_steps("DataLoader(data, 16, shuffle=True, collate_fn=task.collate)")


# The loop itself divides by 0 in a whole batch without a label, so alone it diverges as written.
@pytest.mark.parametrize("workers", [4, pytest.param(8, marks=pytest.mark.extended)])
@pytest.mark.ci
def test_labels_that_are_found_in_a_script(tmp_path: Path, workers: int) -> None:
    make_task = loop_script(tmp_path, FOUND, FewLabels)

    assert_as_plain(make_task, workers, twin=FewLabels, loop=accumulated)


class Dropping(Points):
    """A third of the samples is None, which ``collate`` drops, but for those that are first."""

    samples, batch_size = 512, 8

    def dataset(self, split: str) -> Any:
        data = list(super().dataset(split))
        if split == "train":
            kept = {1, *next(iter(orders(self.samples, 1, 0, self.batch_size)))[::2]}
            data = [each if at % 3 or at in kept else None for at, each in enumerate(data)]
        return data

    def collate(self, samples: list[Any]) -> Any:
        present = [each for each in samples if each is not None]
        return super().collate(present) if present else None


def test_a_part_whose_samples_are_all_left_out_has_no_weight() -> None:
    assert simulated(Dropping, 4, epochs=1)["loss"] < 2.5


class NoNumber(MeanOverTokens):
    def batch_weight(self, batch: Any) -> Tensor:
        return torch.tensor(float("nan"))


def test_a_weight_that_is_no_number() -> None:
    with pytest.raises(UserCodeError, match="batch_weight returned nan"):
        simulated(NoNumber, 2)


def test_shares_of_a_step() -> None:
    weights = BatchWeights(float, per_sample=2.0)
    weights.begin()

    assert [weights.share(weight) for weight in (0, 4, 2, 0)] == [0.0, 1.0, 0.5, 0.0]
    assert (weights.step, weights.total) == (3.0, 1.5)

    weights.begin()
    assert (weights.step, weights.total) == (0.0, 0.0)
