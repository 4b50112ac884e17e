"""Any data trains as in a plain loop: samplers, streams, sequences, and open files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    SEEDS,
    Metrics,
    Points,
    assert_as_plain,
    assert_close,
    evaluate_plainly,
    extended,
    facts_of,
    grid,
    learner_of,
    loop_script,
    own_steps,
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

from vcasgd.errors import SpecError
from vcasgd.learning.draws import Draws
from vcasgd.learning.layout import Layout

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS = 2


# -- samplers --------------------------------------------------------------------------------------


class Weighted(Points):
    """Rare classes are drawn as often as frequent ones."""

    loader = "DataLoader(data, 64, sampler=task.sampler(data))"

    def sampler(self, dataset: Dataset[Any]) -> WeightedRandomSampler:
        assert isinstance(dataset, TensorDataset)
        labels = dataset.tensors[1]
        return WeightedRandomSampler(1.0 / labels.bincount()[labels], len(labels))


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
    loader = "DataLoader(data, batch_sampler=task.sampler(data))"

    def sampler(self, dataset: Dataset[Any]) -> Buckets:
        assert isinstance(dataset, TensorDataset)
        return Buckets(dataset.tensors[0][:, 0].abs().mul(20).long(), self.batch_size)


class BucketedSgd(Bucketed):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class WholeBuckets(BucketedSgd):
    min_local_batch = BucketedSgd.batch_size


class BucketedRms(Bucketed):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-3)


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
    update = {"rule": "rounds", "codec": "bfloat16"}
    learner = learner_of(globals()[task](), 8, push_every=1, update=update)
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
    loader = "DataLoader(data, 64, shuffle=True)"
    samples = 4 * Points.samples

    def dataset(self, split: str) -> Dataset[Any]:
        data = super().dataset(split)
        return OneQuarter(data) if split == "train" else data


class FollowsEpochInAProcess(FollowsEpoch):
    loader_workers = 1


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
    loader = "DataLoader(data, 64, num_workers=1)"

    def dataset(self, split: str) -> Any:
        return Lines(super().dataset(split))


class Streams(Points):
    """Streams of Hugging Face, shuffled in a buffer, in each epoch again."""

    loader = "DataLoader(data, 64, collate_fn=task.collate)"

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


#: Data whose samples are batches, which are evaluated one by one.
OWN_BATCHES = """
class Batches(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return [part[64 * index : 64 * index + 64] for part in data.tensors]


class Backwards:
    def __iter__(self):
        return reversed(range(64))


"""


@pytest.mark.parametrize("order", ["shuffle=True", "sampler=Backwards()"])
def test_samples_that_are_batches(tmp_path: Path, order: str) -> None:
    # Given a loader, whose sampler may have no length
    loop = OWN_BATCHES + own_steps(f"DataLoader(Batches(), batch_size=None, {order})")
    sgd = "torch.optim.SGD(model.parameters(), lr=0.1)"

    ends = simulated(loop_script(tmp_path, loop, optimizer=sgd), 1, epochs=1)

    assert ends["loss"] < 2.3


SAMPLER = "torch.utils.data.BatchSampler(range({0}, 1024), 32, drop_last=True)"
OWN_SAMPLER = f"[*{SAMPLER.format(0)}]"


@pytest.mark.parametrize("call", ["loader", "batches"])
@pytest.mark.parametrize("batches", ["DataLoader(Batches(), batch_size=None)", OWN_SAMPLER])
def test_batches_of_a_loader_have_one_size(tmp_path: Path, call: str, batches: str) -> None:
    loader = batches if "Data" in batches else f"DataLoader(data, batch_sampler={batches})"
    loop = OWN_BATCHES + own_steps(f"{loader}, 64").replace("loader(Data", f"{call}(Data")

    with pytest.raises(SpecError, match="the batches of the loader have sizes of their own"):
        simulated(loop_script(tmp_path, loop), 1, epochs=1)


def test_batches_of_a_sampler_get_another_size(tmp_path: Path) -> None:
    sizes = []
    for size in ("", ", 64"):
        loader = f"DataLoader(data, batch_sampler={SAMPLER.format(512)}){size}"
        task = loop_script(tmp_path, own_steps(loader))()
        facts = facts_of(task)
        sizes.append((facts.batch_size, facts.samples))

    assert sizes == [(32, 512), (64, 512)]


# -- sequences -------------------------------------------------------------------------------------


class Series(Points):
    """Samples in the order of time."""

    loader = "DataLoader(data, 64)"

    def sampler(self, dataset: Dataset[Any]) -> Any:
        return range(len(dataset))


# -- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        Weighted,
        *extended(Series, Bucketed, FollowsEpoch, Iterates, Streams),
        *extended(BucketedSgd, BucketedRms, FollowsEpochInAProcess),
    ],
)
@grid
def test_any_loader(make: Any, workers: int) -> None:
    def loop(task: Any, model: nn.Module, optimizer: Optimizer, *_: int) -> Metrics:
        data = task.dataset("train")
        loader = eval(task.loader, {"DataLoader": DataLoader, "data": data, "task": task})
        for epoch in range(EPOCHS):
            for told in (loader.dataset, loader.sampler, loader.batch_sampler):
                if hasattr(told, "set_epoch"):
                    told.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                task.loss(model, batch).backward()
                optimizer.step()
        return evaluate_plainly(task, model)

    if make is BucketedSgd and workers == 8:
        # The remedy that the event batches-mixed has. Without it, four seeds end 2.3 % worse.
        make = WholeBuckets
    # Two seeds of eight workers can differ by as much as the bound.
    seeds = range(4) if workers == 8 else SEEDS
    assert_as_plain(make, workers, EPOCHS, loop=loop, seeds=seeds)


@pytest.mark.parametrize(
    "task", [Series, *extended(Weighted, Bucketed, FollowsEpoch, Iterates, Streams)]
)
@pytest.mark.ci
def test_a_script_passes_its_loader_on(task: Any, tmp_path: Path) -> None:
    make_task = loop_script(tmp_path, own_steps(task.loader), task)

    ends = [simulated(make, 4, epochs=EPOCHS)["loss"] for make in (make_task, task)]

    assert_close(ends[:1], ends[1:])


def test_an_evaluation_has_the_samples_that_its_sampler_draws(tmp_path: Path) -> None:
    drawn = "torch.utils.data.SubsetRandomSampler(range(512))"
    held_out = f"session.evaluation(DataLoader(data, 64, sampler={drawn}))(task.evaluate)"
    task = loop_script(tmp_path, own_steps(Series.loader), Series, evaluation=held_out)

    assert simulated(task, 1, max_steps=4)["count"] == 512


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
