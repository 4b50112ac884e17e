"""The local training loop, on a model with one weight whose steps can be computed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.batches import batches, trained_on
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.optim import Optimizer

import vcasgd
from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError
from vcasgd.learning.draws import seed_for
from vcasgd.learning.model_evaluation import evaluate
from vcasgd.learning.training import Interval, build, to_device

CPU = torch.device("cpu")


def numbers(length: int) -> Any:
    """Return a data set whose sample k is the number k + 1."""
    return torch.arange(1.0, length + 1).view(length, 1)


class Slope(vcasgd.Task):
    """The loss is the mean of w·x, so its gradient is the mean of x; w starts at 0."""

    batch_size = 2
    evaluation_batch_size = 2

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def dataset(self, split: str) -> Any:
        return numbers(5)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = model(batch).mean()
        return mean

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"total": batch.sum(), "count": torch.tensor(len(batch))}


def trained(task: vcasgd.Task, count: int, **options: Any) -> tuple[Any, Interval]:
    """Train the first samples from the first model, and return the model as well."""
    model = build(task, 0, CPU)
    return model, trained_on(task, model, task.optimizer(model.parameters()), count, **options)


def evaluated(task: vcasgd.Task, dataset: Any, **options: Any) -> dict[str, float]:
    return evaluate(task, build(task, 0, CPU), dataset, CPU, **options)


def used(task: vcasgd.Task) -> None:
    trained(task, 1)
    evaluated(task, numbers(2))


def test_a_seed_builds_one_model_and_leaves_the_random_state() -> None:
    class Random(Slope):
        def model(self) -> nn.Module:
            return nn.Linear(3, 3)

    before = torch.random.get_rng_state()
    first, second, other = (build(Random(), seed, CPU).weight for seed in (1, 1, 2))

    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def fails(self: Any, *args: Any) -> Any:
    raise KeyError("reason")


@pytest.mark.parametrize("method", ["model", "loss", "evaluate", "dataset"])
def test_exceptions_become_user_code_errors(method: str) -> None:
    damaged = type("Damaged", (list,), {"__getitem__": fails})([1, 2])
    broken = (lambda *_: damaged) if method == "dataset" else fails

    with pytest.raises(UserCodeError, match=f"{method} raised KeyError: 'reason'") as caught:
        used(type("Broken", (Slope,), {method: broken})())

    assert "in fails" in caught.value.traceback
    assert "vcasgd/learning" not in caught.value.traceback


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("model", None, r"returned a NoneType, not a torch\.nn\.Module"),
        ("loss", 0.5, "returned float, not a scalar"),
        ("loss", torch.ones(2), r"returned shape \[2\], not a scalar"),
        ("loss", torch.tensor(1.0), "does not require grad"),
        ("evaluate", {"accuracy": 1, "loss": 2}, 'no "count", only accuracy, loss'),
        ("evaluate", {}, 'no "count", only an empty dict'),
        ("evaluate", {"count": 0}, '"count": 0 over the whole'),
        ("evaluate", None, "returned a NoneType, not a dict"),
        ("evaluate", {"loss": "much", "count": 1}, "evaluate raised ValueError"),
    ],
    ids=str,
)
def test_what_a_method_can_not_return_is_an_error(method: str, value: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        used(type("Wrong", (Slope,), {method: lambda *_: value})())


def test_seeds_of_intervals_are_distinct_and_reproducible() -> None:
    seeds = [seed_for(s, k, p) for s in range(3) for k in range(3) for p in range(3)]

    assert len(set(seeds)) == len(seeds)
    assert seeds == [seed_for(s, k, p) for s in range(3) for k in range(3) for p in range(3)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))


class TestBatches:
    @pytest.mark.parametrize(
        ("size", "length", "counts"),
        [
            (2, 0, []),
            (2, 1, [1]),
            (2, 4, [2, 2]),
            (2, 5, [2, 3]),  # BatchNorm can't train on a single sample
            (3, 5, [3, 2]),
            (1, 3, [1, 1, 1]),
            (9, 5, [5]),
        ],
    )
    def test_sizes_and_order(self, size: int, length: int, counts: list[int]) -> None:
        task = Slope()
        task.batch_size = size

        result = list(batches(task, numbers(length), np.arange(length)[::-1]))

        assert [count for _, count in result] == counts
        assert [len(batch) for batch, _ in result] == counts
        assert [int(each) for batch, _ in result for each in batch] == [*range(length, 0, -1)]

    def test_a_data_set_with_getitems_gets_one_call_per_batch(self) -> None:
        calls = []

        class Fast(list[Tensor]):
            def __getitems__(self, indices: list[int]) -> list[Tensor]:
                calls.append(indices)
                return [self[index] for index in indices]

        data: Any = Fast(numbers(4))
        assert len(list(batches(Slope(), data, np.arange(4)))) == 2
        assert calls == [[0, 1], [2, 3]]

    def test_the_tasks_collate_is_used(self) -> None:
        class Listing(Slope):
            def collate(self, samples: list[Any]) -> Any:
                return {"numbers": samples}

        [(batch, _)] = batches(Listing(), numbers(2), np.arange(2))

        assert batch == {"numbers": [torch.tensor([1.0]), torch.tensor([2.0])]}

    @pytest.mark.parametrize("size", [0, -1, 1.5, None])
    def test_an_invalid_batch_size_is_an_error(self, size: Any) -> None:
        task = Slope()
        task.batch_size = size

        with pytest.raises(SpecError, match="batch_size is"):
            batches(task, numbers(2), np.arange(2))


class Pair(NamedTuple):
    left: Tensor
    right: str


def test_nested_tensors_are_moved() -> None:
    batch = {
        "a": [torch.ones(1), ("text", torch.ones(2))],
        "b": Pair(torch.ones(3), "text"),
        "c": 4,
    }

    moved = to_device(batch, "meta")

    assert moved["a"][0].is_meta
    assert moved["a"][1][0] == "text"
    assert moved["a"][1][1].is_meta
    assert isinstance(moved["b"], Pair)
    assert moved["b"].left.is_meta
    assert moved["c"] == 4


def test_objects_with_a_to_method_are_moved() -> None:
    packed = pack_sequence([torch.ones(2)])

    moved = to_device(packed, "meta")

    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta  # torch wants these on the CPU


class TestTrain:
    def test_by_hand(self) -> None:
        model, interval = trained(Slope(), 4)

        # x̄ = 1.5: loss 0, w = −1.5; x̄ = 3.5: loss −5.25, w = −5
        assert model.weight.item() == -5.0
        assert interval == Interval(samples=4, steps=2, loss_sum=2 * 0.0 + 2 * -5.25)

    def test_it_stops_after_the_current_step(self) -> None:
        _, interval = trained(Slope(), 4, after_step=lambda: True)

        assert (interval.samples, interval.steps) == (2, 1)

    def test_no_batches(self) -> None:
        assert trained(Slope(), 0)[1] == Interval(samples=0, steps=0, loss_sum=0.0)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_loss_that_is_not_finite_leaves_the_parameters_unchanged(self, value: float) -> None:
        models = []

        class Diverging(Slope):
            def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
                models.append(model)
                return super().loss(model, batch) * (value if 3.0 in batch else 1)

        with pytest.raises(NonFiniteLoss, match=r"in local step 2 .*lower the learning rate"):
            trained(Diverging(), 4)

        assert models[0].weight.item() == -1.5

    def test_a_layer_in_evaluation_mode_stays_in_it(self) -> None:
        class Frozen(Slope):
            def model(self) -> nn.Module:
                return nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1).eval())

        model, _ = trained(Frozen(), 2)

        assert [part.training for part in model.children()] == [True, False]


class TestEvaluate:
    def test_means_over_the_whole_set(self) -> None:
        assert evaluated(Slope(), numbers(5)) == {"total": 3.0, "count": 5.0}

    def test_evaluation_mode_without_gradients_is_restored_afterwards(self) -> None:
        class Watching(Slope):
            def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
                assert not model.training
                assert not torch.is_grad_enabled()
                return super().evaluate(model, batch)

        model = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
        evaluate(Watching(), model, numbers(2), CPU)

        assert model.training
        assert [part.training for part in model] == [True, False]
        assert torch.is_grad_enabled()

    def test_a_metric_that_is_not_finite_is_reported(self) -> None:
        metrics = {"loss": torch.tensor(math.nan), "count": torch.tensor(2)}
        task = type("Diverged", (Slope,), {"evaluate": lambda *_: metrics})()

        assert math.isnan(evaluated(task, numbers(2))["loss"])

    def test_an_interrupted_evaluation_returns_nothing(self) -> None:
        answers = iter([False, True])

        assert evaluated(Slope(), numbers(5), after_step=lambda: next(answers)) == {}

    def test_a_data_set_that_is_empty_or_has_no_length_is_an_error(self) -> None:
        with pytest.raises(SpecError, match="the validation data set is empty"):
            evaluated(Slope(), numbers(0))
        with pytest.raises(UserCodeError, match="dataset raised TypeError"):
            evaluated(Slope(), object())
