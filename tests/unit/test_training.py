"""The local training loop, on a model with one weight whose steps can be computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.batches import batches
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd
from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError
from vcasgd.learning.training import (
    Interval,
    build,
    evaluate,
    seed_for,
    to_device,
    train,
)

CPU = torch.device("cpu")


class Numbers(Dataset[Tensor]):
    """Sample k is the number k + 1."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 1.0])


class Slope(vcasgd.Task):
    """The loss is the mean of w·x, so its gradient is the mean of x; w starts at 0."""

    batch_size = 2
    evaluation_batch_size = 2

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def dataset(self, split: str) -> Dataset[Tensor]:
        return Numbers(5)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = model(batch).mean()
        return mean

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"total": batch.sum(), "count": torch.tensor(len(batch))}


def never() -> bool:
    return False


def nothing() -> None:
    pass


def trained(
    task: vcasgd.Task,
    indices: list[int],
    should_stop: Callable[[], bool] = never,
    on_step: Callable[[], None] = nothing,
) -> tuple[nn.Module, Interval]:
    model = build(task, 0, CPU)
    interval = train(
        task,
        model,
        task.optimizer(model.parameters()),
        batches(task, task.dataset("train"), np.array(indices, dtype=np.int64)),
        CPU,
        should_stop=should_stop,
        on_step=on_step,
    )
    return model, interval


def evaluated(
    task: vcasgd.Task, dataset: Dataset[Any], should_stop: Callable[[], bool] = never
) -> dict[str, float]:
    model = build(task, 0, CPU)
    return evaluate(task, model, dataset, CPU, should_stop=should_stop, on_step=nothing)


class TestBuild:
    def test_the_same_seed_builds_the_same_model(self) -> None:
        class Random(Slope):
            def model(self) -> nn.Module:
                return nn.Linear(3, 3)

        first, second, other = (build(Random(), seed, CPU) for seed in (1, 1, 2))

        assert torch.equal(first.weight, second.weight)  # type: ignore[arg-type]
        assert not torch.equal(first.weight, other.weight)  # type: ignore[arg-type]

    def test_the_random_state_is_unchanged(self) -> None:
        before = torch.random.get_rng_state()

        build(Slope(), 7, CPU)

        assert torch.equal(torch.random.get_rng_state(), before)

    def test_exceptions_become_user_code_errors(self) -> None:
        class Broken(Slope):
            def model(self) -> nn.Module:
                raise KeyError("layers")

        with pytest.raises(UserCodeError, match="model raised KeyError: 'layers'") as caught:
            build(Broken(), 0, CPU)
        assert "in model" in caught.value.traceback
        assert "_user_code" not in caught.value.traceback

    def test_a_model_that_is_not_a_module_is_an_error(self) -> None:
        class Forgetful(Slope):
            def model(self) -> nn.Module:
                return None  # type: ignore[return-value]

        with pytest.raises(UserCodeError, match=r"returned a NoneType, not a torch\.nn\.Module"):
            build(Forgetful(), 0, CPU)


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
    def test_sizes(self, size: int, length: int, counts: list[int]) -> None:
        task = Slope()
        task.batch_size = size

        result = list(batches(task, Numbers(length), np.arange(length)))

        assert [count for _, count in result] == counts
        assert [len(batch) for batch, _ in result] == counts

    def test_the_order_is_kept(self) -> None:
        result = [
            batch.flatten().tolist()
            for batch, _ in batches(Slope(), Numbers(5), np.array([4, 0, 2, 1]))
        ]

        assert result == [[5, 1], [3, 2]]

    def test_a_data_set_with_getitems_gets_one_call_per_batch(self) -> None:
        calls = []

        class Fast(Numbers):
            def __getitems__(self, indices: list[int]) -> list[Tensor]:
                calls.append(indices)
                return [self[index] for index in indices]

        assert len(list(batches(Slope(), Fast(4), np.arange(4)))) == 2
        assert calls == [[0, 1], [2, 3]]

    def test_the_tasks_collate_is_used(self) -> None:
        class Listing(Slope):
            def collate(self, samples: list[Any]) -> Any:
                return {"numbers": samples}

        [(batch, _)] = batches(Listing(), Numbers(2), np.arange(2))

        assert batch == {"numbers": [torch.tensor([1.0]), torch.tensor([2.0])]}

    def test_exceptions_become_user_code_errors(self) -> None:
        class Damaged(Numbers):
            def __getitem__(self, index: int) -> Tensor:
                raise OSError("file is damaged")

        with pytest.raises(
            UserCodeError, match="dataset raised OSError: file is damaged"
        ) as caught:
            list(batches(Slope(), Damaged(2), np.arange(2)))
        assert "in __getitem__" in caught.value.traceback

    @pytest.mark.parametrize("size", [0, -1, 1.5, None])
    def test_an_invalid_batch_size_is_an_error(self, size: Any) -> None:
        task = Slope()
        task.batch_size = size

        with pytest.raises(SpecError, match="batch_size is"):
            batches(task, Numbers(2), np.arange(2))


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
        model, interval = trained(Slope(), [0, 1, 2, 3])

        # x̄ = 1.5: loss 0, w = −1.5; x̄ = 3.5: loss −5.25, w = −5
        assert model.weight.item() == -5.0  # type: ignore[operator]
        assert interval == Interval(samples=4, steps=2, loss_sum=2 * 0.0 + 2 * -5.25)

    def test_it_stops_after_the_current_step(self) -> None:
        steps: list[int] = []

        _, interval = trained(Slope(), [0, 1, 2, 3], lambda: True, lambda: steps.append(1))

        assert (interval.samples, interval.steps, steps) == (2, 1, [1])

    def test_no_batches(self) -> None:
        assert trained(Slope(), [])[1] == Interval(samples=0, steps=0, loss_sum=0.0)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_loss_that_is_not_finite_leaves_the_parameters_unchanged(self, value: float) -> None:
        class Diverging(Slope):
            def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
                loss: Tensor = model(batch).mean()
                return loss * value if 3.0 in batch else loss

        task = Diverging()
        model = build(task, 0, CPU)
        optimizer = task.optimizer(model.parameters())
        stream = batches(task, Numbers(4), np.arange(4))

        with pytest.raises(NonFiniteLoss, match=r"in local step 2 .*lower the learning rate"):
            train(task, model, optimizer, stream, CPU, should_stop=never, on_step=nothing)

        assert model.weight.item() == -1.5  # type: ignore[operator]

    def test_exceptions_become_user_code_errors(self) -> None:
        class Broken(Slope):
            def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
                raise RuntimeError("shapes do not match")

        with pytest.raises(UserCodeError, match="loss raised RuntimeError: shapes") as caught:
            trained(Broken(), [0])
        assert "in loss" in caught.value.traceback
        assert "vcasgd/learning" not in caught.value.traceback

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (0.5, "returned float, not a scalar"),
            (torch.ones(2), r"returned shape \[2\], not a scalar"),
            (torch.tensor(1.0), "does not require grad"),
        ],
    )
    def test_an_invalid_loss_is_an_error(self, loss: Any, message: str) -> None:
        class Wrong(Slope):
            def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
                return loss  # type: ignore[no-any-return]

        with pytest.raises(UserCodeError, match=message):
            trained(Wrong(), [0])

    def test_a_layer_in_evaluation_mode_stays_in_it(self) -> None:
        class Frozen(Slope):
            def model(self) -> nn.Module:
                norm = nn.BatchNorm1d(1)
                return nn.Sequential(nn.Linear(1, 1), norm.eval())

        model, _ = trained(Frozen(), [0, 1])

        assert [part.training for part in model.children()] == [True, False]


class TestEvaluate:
    def test_means_over_the_whole_set(self) -> None:
        assert evaluated(Slope(), Numbers(5)) == {"total": 3.0, "count": 5.0}

    def test_evaluation_mode_without_gradients_is_restored_afterwards(self) -> None:
        class Watching(Slope):
            def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
                assert not model.training
                assert not torch.is_grad_enabled()
                return super().evaluate(model, batch)

        model = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
        evaluate(Watching(), model, Numbers(2), CPU, should_stop=never, on_step=nothing)

        assert model.training
        assert [part.training for part in model] == [True, False]
        assert torch.is_grad_enabled()

    def test_a_metric_that_is_not_finite_is_reported(self) -> None:
        class Diverged(Slope):
            def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
                return {"loss": torch.tensor(math.nan), "count": torch.tensor(len(batch))}

        assert math.isnan(evaluated(Diverged(), Numbers(2))["loss"])

    def test_an_interrupted_evaluation_returns_nothing(self) -> None:
        answers = iter([False, True])

        assert evaluated(Slope(), Numbers(5), lambda: next(answers)) == {}

    def test_an_empty_data_set_is_an_error(self) -> None:
        with pytest.raises(SpecError, match="the validation data set is empty"):
            evaluated(Slope(), Numbers(0))

    @pytest.mark.parametrize(
        ("metrics", "message"),
        [
            ({"accuracy": 1, "loss": 2}, 'no "count", only accuracy, loss'),
            ({}, 'no "count", only an empty dict'),
            ({"count": 0}, '"count": 0 over the whole'),
            (None, "returned a NoneType, not a dict"),
            ({"loss": "much", "count": 1}, "evaluate raised ValueError"),
        ],
    )
    def test_metrics_that_cannot_be_averaged_are_an_error(self, metrics: Any, message: str) -> None:
        class Wrong(Slope):
            def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
                return metrics  # type: ignore[no-any-return]

        with pytest.raises(UserCodeError, match=message):
            evaluated(Wrong(), Numbers(2))

    def test_a_data_set_without_a_length_is_an_error(self) -> None:
        class Endless(Dataset[Tensor]):
            pass

        with pytest.raises(UserCodeError, match="dataset raised TypeError"):
            evaluated(Slope(), Endless())
