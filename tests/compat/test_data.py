"""Any data trains as in a plain loop: samplers, streams, sequences, and open files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.test_buffers import facts_of
from support.compat import (
    Case,
    Metrics,
    Points,
    assert_as_plain,
    assert_close,
    evaluate_plainly,
    grid,
    script,
    simulated,
)
from support.harness import Harness
from support.training import Training
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import vcasgd
from vcasgd.learning.draws import Draws
from vcasgd.learning.layout import Layout
from vcasgd.spec.job import JobSpec
from vcasgd.worker.learner import Learner

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS = 2


def loop(task: vcasgd.Task, loader: DataLoader[Any], seed: int, epochs: int = EPOCHS) -> Metrics:
    """Train a task with an ordinary loader, as a plain script does."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    for epoch in range(epochs):
        for told in (loader.dataset, loader.sampler, loader.batch_sampler):
            if hasattr(told, "set_epoch"):
                told.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return evaluate_plainly(task, model)


def case_of(task: type[vcasgd.Task], loader: Any) -> Case:
    """Return a case whose twin uses ``loader(task)``."""

    def twin(seed: int) -> Metrics:
        made = task()
        torch.manual_seed(seed)
        return loop(made, loader(made), seed)

    return Case(task, EPOCHS, twin=twin)


# -- samplers --------------------------------------------------------------------------------------


class Weighted(Points):
    """Rare classes are drawn as often as frequent ones."""

    def sampler(self, dataset: Dataset[Any]) -> WeightedRandomSampler:
        assert isinstance(dataset, TensorDataset)
        labels = dataset.tensors[1]
        return WeightedRandomSampler(1.0 / labels.bincount()[labels], len(labels))


@grid
def test_a_weighted_sampler(workers: int) -> None:
    def loader(task: Weighted) -> DataLoader[Any]:
        data = task.dataset("train")
        return DataLoader(data, task.batch_size, sampler=task.sampler(data))

    assert_as_plain(case_of(Weighted, loader), workers)


class Buckets(Sampler[list[int]]):
    """Batches of samples of similar length."""

    def __init__(self, lengths: Tensor, batch_size: int) -> None:
        self.lengths, self.batch_size = lengths, batch_size
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[list[int]]:
        # Of equal lengths, any may be neighbours.
        noise = torch.rand(len(self.lengths), generator=self.generator)
        batches = (self.lengths + noise).argsort().split(self.batch_size)
        for number in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[number].tolist()


class Bucketed(Points):
    def sampler(self, dataset: Dataset[Any]) -> Buckets:
        assert isinstance(dataset, TensorDataset)
        return Buckets(dataset.tensors[0][:, 0].abs().mul(20).long(), self.batch_size)


class BucketedSgd(Bucketed):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class BucketedRms(Bucketed):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-3)


@pytest.mark.parametrize("task", [Bucketed, BucketedSgd, BucketedRms])
@pytest.mark.extended
@grid
def test_a_batch_sampler_with_batches_of_similar_length(workers: int, task: type[Bucketed]) -> None:
    def loader(task: Bucketed) -> DataLoader[Any]:
        data = task.dataset("train")
        return DataLoader(data, batch_sampler=task.sampler(data))

    assert_as_plain(case_of(task, loader), workers)


@pytest.mark.parametrize(
    ("task", "fields", "exchanged", "noted"),
    [
        ("Weighted", {}, False, False),
        ("Series", {}, True, False),
        ("Bucketed", {}, True, True),
        ("BucketedSgd", {}, False, True),
        ("Series", {"push_every": 4}, False, True),
    ],
)
def test_samples_in_an_order_of_their_own_need_mean_gradients(
    task: str, fields: dict[str, Any], exchanged: bool, noted: bool
) -> None:
    facts = facts_of(globals()[task](), **fields)

    assert Layout.from_json(facts.layout).gradients is exchanged
    assert ("batches-mixed" in facts.notes) is noted


def test_both_reasons_against_mixed_batches_are_noted() -> None:
    note = facts_of(Bucketed(), push_every=4).notes["batches-mixed"]

    assert "the sampler has batches of its own" in note
    assert "the samples aren't in a random order" in note


@pytest.mark.parametrize(("task", "whole"), [("BucketedSgd", False), ("Bucketed", True)])
def test_rounds_are_shorter_than_the_batches_of_a_sampler(task: str, whole: bool) -> None:
    """Given corrected second moments, they have whole batches, because its parts are alike."""
    job = {"name": "j", "task": "t:T", "epochs": 1, "workers": {"max": 8}, "push_every": 1}
    job |= {"update": {"rule": "rounds", "codec": "bfloat16"}}
    learner = Learner(JobSpec.parse(job), globals()[task](), "cpu")
    learner.start_subtask()

    assert learner.interval_stop(0, 0) == (64 if whole else 8)


class OneQuarter(Dataset[Any]):
    """Each epoch has another quarter of the data, which ``set_epoch`` chooses."""

    def __init__(self, data: Any) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data) // 4

    def __getitem__(self, index: int) -> Any:
        return self.data[4 * index + self.epoch % 4]


class FollowsEpoch(Points):
    samples = 4 * Points.samples

    def dataset(self, split: str) -> Dataset[Any]:
        data = super().dataset(split)
        return OneQuarter(data) if split == "train" else data


@pytest.mark.extended
@grid
@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_a_data_set_with_set_epoch(workers: int, processes: int) -> None:
    class Task(FollowsEpoch):
        loader_workers = processes

    def loader(task: Task) -> DataLoader[Any]:
        return DataLoader(task.dataset("train"), task.batch_size, shuffle=True)

    assert_as_plain(case_of(Task, loader), workers)


#: The same kinds as scripts, which pass on their loaders.
SCRIPT = """
import sys
import torch
import vcasgd
from torch.utils.data import DataLoader

sys.path[:0] = {path!r}
import test_data as cases

task = cases.{task}()
model = task.model()
optimizer = task.optimizer(model.parameters())
data = task.dataset("train")
session = vcasgd.Session(model, optimizer)
session.evaluation(task.dataset("validation"))(task.evaluate)
for batch in session.loader({loader}):
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    optimizer.step()
"""
LOADERS = {
    "Weighted": "DataLoader(data, 64, sampler=task.sampler(data))",
    "Bucketed": "DataLoader(data, batch_sampler=task.sampler(data))",
    "FollowsEpoch": "DataLoader(data, 64, shuffle=True)",
    "Iterates": "DataLoader(data, 64, num_workers=1)",
    "Streams": "DataLoader(data, 64, collate_fn=task.collate)",
    "Series": "DataLoader(data, 64)",
}


@pytest.mark.parametrize(
    "task",
    [
        task if task == "Series" else pytest.param(task, marks=pytest.mark.extended)
        for task in LOADERS
    ],
)
@pytest.mark.ci
def test_a_script_passes_its_loader_on(task: str, tmp_path: Path) -> None:
    here = Path(__file__)
    path = [str(here.parent), str(here.parents[1])]
    source = SCRIPT.format(path=path, task=task, loader=LOADERS[task])
    make_task = script(source, tmp_path)

    ends = [simulated(make, 4, epochs=2)["loss"] for make in (make_task, globals()[task])]

    assert_close(ends[:1], ends[1:])


# -- data that can only be iterated over -----------------------------------------------------------


class Lines(IterableDataset[Any]):
    """Yields the samples of a loader process, as torch's documentation shows it."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.data[index] for index in range(first, len(self.data), step))


class Iterates(Points):
    def dataset(self, split: str) -> Any:
        return Lines(super().dataset(split))


@pytest.mark.extended
@grid
def test_an_iterable_data_set(workers: int) -> None:
    def twin(seed: int) -> Metrics:
        return loop(Points(), DataLoader(Points().dataset("train"), 64), seed)

    assert_as_plain(Case(Iterates, EPOCHS, twin=twin), workers)


class Streams(Points):
    """Streams of Hugging Face, shuffled in a buffer, in each epoch again."""

    def dataset(self, split: str) -> Any:
        data = super().dataset(split)
        if split != "train":
            return data
        from datasets import Dataset as Table

        assert isinstance(data, TensorDataset)
        points, labels = (tensor.numpy() for tensor in data.tensors)
        table = Table.from_dict({"points": list(points), "label": labels}).with_format("torch")
        return table.to_iterable_dataset(num_shards=16).shuffle(seed=1, buffer_size=300)

    def collate(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], dict):
            return super().collate(samples)
        batch = super().collate(samples)
        return [batch["points"], batch["label"]]


@pytest.mark.extended
@grid
def test_a_stream_of_hugging_face(workers: int) -> None:
    def loader(task: Streams) -> DataLoader[Any]:
        return DataLoader(task.dataset("train"), task.batch_size, collate_fn=task.collate)

    assert_as_plain(case_of(Streams, loader), workers)


#: Data whose samples are batches, which are evaluated one by one.
OWN_BATCHES = """
import torch, vcasgd
from torch.utils.data import DataLoader
from support.compat import Points

class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return [part[64 * index : 64 * index + 64] for part in data.tensors]

points = Points()
data, model = points.dataset("train"), points.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = vcasgd.Session(model, optimizer)
session.evaluation(points.dataset("validation"))(points.evaluate)
for batch in session.loader(DataLoader(Batches(), batch_size=None, shuffle=True)):
    optimizer.zero_grad()
    points.loss(model, batch).backward()
    optimizer.step()
"""


def test_samples_that_are_batches(tmp_path: Path) -> None:
    ends = simulated(script(OWN_BATCHES, tmp_path), 1, epochs=1)

    assert ends["loss"] < 2.3


# -- sequences -------------------------------------------------------------------------------------


class Series(Points):
    """Samples in the order of time."""

    def sampler(self, dataset: Dataset[Any]) -> Any:
        return range(len(dataset))  # type: ignore[arg-type]


@pytest.mark.extended
@grid
def test_data_in_order(workers: int) -> None:
    def loader(task: Series) -> DataLoader[Any]:
        return DataLoader(task.dataset("train"), task.batch_size)

    assert_as_plain(case_of(Series, loader), workers)


# -- exactly once ----------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
@pytest.mark.parametrize("task", ["Iterable", "HuggingFace", "Weighted"])
def test_a_worker_is_killed_and_every_draw_counts_once(harness: Harness, task: str) -> None:
    # Given a job on two workers
    sampler = WeightedRandomSampler(torch.arange(400) + 1.0, 400)
    order = Draws(sampler, None, seed=0) if task == "Weighted" else None
    training = Training(
        harness, task=f"numbered:{task}", subtasks=8, step_seconds=0.15, order=order
    )
    killed, _ = training.start(2)
    harness.start_job_loop()

    # When one of them is killed in the middle of a push interval, and of a shard
    training.freeze_mid_interval(killed)
    training.worker(killed).kill()

    # Then a third one resumes its work, and each sample of each epoch counts exactly once
    training.add_workers(1)
    training.await_success()
    assert 0 < training.repeated_samples() <= training.most_repeated_samples()
