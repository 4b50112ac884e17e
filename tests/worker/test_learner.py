"""The learner, on a task whose every step is known."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd
from vcasgd.errors import MachineDiffers, NonFiniteLoss, SpecError, UserCodeError
from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import ShardRange
from vcasgd.spec.job import JobSpec
from vcasgd.store.tensors.snapshot import RoundFacts
from vcasgd.worker.interval import Base, Trained, continued
from vcasgd.worker.learner import Learner


class Ones(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)


class Slope(vcasgd.Task):
    """A task where each local step subtracts 1 from the only weight."""

    batch_size = 2

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def dataset(self, split: str) -> Dataset[Tensor]:
        return Ones()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = model(batch).mean()
        return mean

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)


def learner_of(task: vcasgd.Task | None = None, **fields: Any) -> Learner:
    spec = {"name": "job", "task": "t:T", "epochs": 2, "subtasks_per_epoch": 2, **fields}
    learner = Learner(JobSpec.parse(spec), task or Slope(), "cpu")
    learner.start_subtask()
    return learner


def base_of(*weights: float, **fields: Any) -> Base:
    return Base(torch.tensor(weights), torch.empty(0, dtype=torch.int64), **fields)


def train(learner: Learner, base: Base, subtask: int = 0, stop: int = 4, **options: Any) -> Trained:
    """Train an interval of two local steps, by default."""
    return learner.train(*(base, subtask, 0, stop), **options)


def change(learner: Learner, weight: float, subtask: int = 0, rollbacks: int = 0) -> float:
    """Return the update of an interval from a snapshot with this weight."""
    return train(learner, base_of(weight, rollbacks=rollbacks), subtask).update.item()


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ({"rule": "vc-asgd"}, [8, 18]),
        ({"rule": "async-local-sgd"}, [-2, -2]),
        # It continues from its own copy: 8 + 0.25·(20 − 8) = 11, then two steps.
        ({"rule": "sma", "moving_rate": 0.25}, [8, 9]),
    ],
)
def test_updates_of_each_rule(update: dict[str, Any], expected: list[float]) -> None:
    learner = learner_of(update=update)

    assert [change(learner, 10.0), change(learner, 20.0)] == expected


@pytest.mark.parametrize(("subtask", "overlaps"), [(0, False), (2, True)])
def test_steps_overlap_with_exchanges_in_the_second_half_of_a_job(
    subtask: int, overlaps: bool
) -> None:
    learner = learner_of(update={"rule": "rounds"})
    assert learner.member is not None
    # Exchanges are shorter than steps.
    short = RoundFacts(workers=2, batch=2, step_seconds=1.0, exchange_seconds=0.1)
    base = base_of(10.0, round=short)
    learner.member.follow(base)

    train(learner, base, subtask)

    assert learner.member.overlaps is overlaps
    assert learner.max_unapplied == 1 + overlaps


def test_a_base_with_an_own_update_has_its_sums_and_its_statistics() -> None:
    base = base_of(1.0, 2, 3, 4, version=7)
    update, second = torch.full((4,), 10.0), ShardRange(1, 2, 4, parameters=1)

    ahead = continued(base, update, [second], out=torch.empty(4))

    assert ahead.floats.tolist() == [1, 2, 13, 10]
    assert (base.floats.tolist(), ahead.version) == ([1, 2, 3, 4], 7)


@pytest.mark.parametrize("rule", ["async-local-sgd", "vc-asgd", "sma"])
def test_an_update_is_written_into_given_memory(rule: str) -> None:
    learner = learner_of(Normalized(), update={"rule": rule})
    base, memory = Base(*learner.initial()), torch.empty(learner.layout.floats)

    first = train(learner, base, memory=lambda: memory).update.clone()

    learner = learner_of(Normalized(), update={"rule": rule})
    assert torch.equal(train(learner, base).update, first)
    assert torch.equal(memory, first)


class Normalized(Slope):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_a_schedule_follows_the_job_and_not_the_worker() -> None:
    class Falling(Slope):
        def schedule(self, progress: float) -> float:
            return 1 - progress

    # 16 samples in four subtasks of two steps each; the worker starts in the middle.
    learner = learner_of(Falling(), update={"rule": "async-local-sgd"})
    steps = [change(learner, 0.0, subtask) for subtask in (2, 3, 0)]

    assert steps == [-(0.5 + 0.375), -(0.25 + 0.125), -(1 + 0.875)]


class Eventful(Slope):
    """A task with state of its own, whose steps draw random numbers and change buffers."""

    def __init__(self) -> None:
        self.steps, self.evaluated = 0, 0
        self.kept: Optimizer | None = None

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1))
        model.register_buffer("last", torch.zeros(1), persistent=False)
        return model

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.kept is None:
            self.kept = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return self.kept

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        vcasgd.log({"steps": self.steps})
        loss = (model(batch) + random.random()).square().mean()
        model.last.fill_(loss.item())
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self.evaluated += 1
        return {"loss": model(batch).sum(), "count": len(batch)}


def test_a_rehearsed_step_and_evaluation_leave_no_trace() -> None:
    def trained(*, rehearsed: bool) -> tuple[Any, ...]:
        random.seed(1)
        torch.manual_seed(1)
        task = Eventful()
        learner = learner_of(task, update={"rule": "async-local-sgd"})
        learner.facts(1)
        if rehearsed:
            learner.rehearse(lambda: None)
            assert task.evaluated == 1
        module = learner._model.module
        state = [*learner.initial(), torch.rand(1), module.last.clone()]
        done = train(learner, Base(*learner.initial()))
        values = [each.tolist() for each in (*state, done.update, done.integers)]
        return *values, done.logged, task.steps, done.loss_sum

    assert trained(rehearsed=True) == trained(rehearsed=False)


def test_a_rehearsal_finds_mistakes_of_both() -> None:
    class BadStep(Eventful):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            raise KeyError("labels")

    class BadEvaluation(Eventful):
        def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            # What a step leaves behind.
            assert model[0].weight.grad is None
            raise KeyError("labels")

    for task, name in ((BadStep(), "loss"), (BadEvaluation(), "evaluate")):
        learner = learner_of(task)
        with pytest.raises(UserCodeError, match=f"{name} raised KeyError"):
            learner.rehearse(lambda: None)


def test_workers_that_exchange_gradients_have_the_rate_of_their_base() -> None:
    class Scheduled(Slope):
        def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
            return torch.optim.RMSprop(parameters, lr=1.0)

        def schedule(self, progress: float) -> float:
            return 1 - progress

    learner = learner_of(Scheduled(), workers={"min": 2, "max": 2})
    learner.findings.follow(learner.facts(1))
    learner.optimizer = None
    learner.start_subtask()
    assert learner.layout.gradients

    def rate(applied: int, subtask: int, stop: int) -> float:
        floats, facts = torch.zeros(learner.layout.floats), RoundFacts(2, 2, samples=applied)
        base = base_of(*floats.tolist(), round=facts)
        train(learner, base, subtask, stop)
        assert learner.optimizer is not None
        return float(learner.optimizer.param_groups[0]["lr"])

    # Whatever their samples are; an interval of a worker that is alone has two steps.
    assert [rate(0, 3, 2), rate(4, 0, 2), rate(4, 2, 2), rate(4, 1, 4)] == [1, 0.75, 0.75, 0.625]


class Tuned(Slope):
    """A task with a frozen layer before the trained weight."""

    def model(self) -> nn.Module:
        frozen = nn.Linear(1, 3, bias=False).requires_grad_(False)
        nn.init.ones_(frozen.weight)
        return nn.Sequential(frozen, nn.Linear(3, 1, bias=False))


class WithMomentum(Slope):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


@pytest.mark.parametrize(("state", "second"), [("reset", -2.5), ("keep", -3.625)])
def test_momentum_is_kept_between_subtasks_on_request(state: str, second: float) -> None:
    learner = learner_of(WithMomentum(), update={"rule": "async-local-sgd"}, optimizer_state=state)
    # Steps of 1 and 1.5; the second subtask starts with a momentum of 1.5 or none.
    assert change(learner, 10.0) == -2.5

    learner.start_subtask()

    assert change(learner, 10.0, subtask=1) == second


def test_a_frozen_backbone_may_be_in_channels_last() -> None:
    class Adapted(Slope):
        def model(self) -> nn.Module:
            module = nn.Linear(1, 1, bias=False)
            module.backbone = nn.Conv2d(2, 2, 3).requires_grad_(False)
            return module.to(memory_format=torch.channels_last)

    layout = Layout.from_json(learner_of(Adapted()).facts(1).layout)

    assert [each.name for each in layout.base] == ["backbone.weight", "backbone.bias"]


def test_steps_before_any_training_leave_a_model_in_double_precision_as_it_was() -> None:
    class Precise(Slope):
        def __init__(self) -> None:
            self.centre = torch.rand(3)

        def model(self) -> nn.Module:
            return nn.Linear(1, 2, dtype=torch.float64)

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, batch.double())

    learner = learner_of(Precise())
    state = learner._model.module.state_dict()
    before = {name: each.clone() for name, each in state.items()}

    learner.facts(1)

    assert all(torch.equal(state[name], each) for name, each in before.items())


def test_a_rollback_halves_the_learning_rate_and_starts_a_new_optimizer() -> None:
    learner = learner_of(WithMomentum(), update={"rule": "async-local-sgd"}, optimizer_state="keep")
    assert change(learner, 10.0) == -2.5

    # In the middle of a subtask, and for a second time.
    assert change(learner, 10.0, rollbacks=1) == -1.25
    assert change(learner, 10.0, rollbacks=2) == -0.625

    # The new optimizer's state is kept.
    learner.start_subtask()
    assert change(learner, 10.0, subtask=1, rollbacks=2) == -3.625 / 4


def test_a_rollback_drops_the_own_copy_of_an_elastic_rule() -> None:
    learner = learner_of(update={"rule": "sma", "moving_rate": 0.25})
    assert change(learner, 10.0) == 8

    assert change(learner, 20.0, rollbacks=1) == 19


def test_an_update_that_is_far_too_large_is_an_error_of_the_learning_rate() -> None:
    class Steep(Slope):
        def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
            return torch.optim.SGD(parameters, lr=1e31)

    # The parameter server would blame the worker.
    with pytest.raises(NonFiniteLoss, match="lower the learning rate"):
        change(learner_of(Steep(), update={"rule": "async-local-sgd"}), 10.0)


def test_an_unfrozen_parameter_is_refused() -> None:
    learner = learner_of(Tuned())

    learner._model.module.requires_grad_(True)

    with pytest.raises(SpecError, match=r"task: 0\.weight of the model was frozen"):
        learner.start_subtask()


def test_a_change_of_a_frozen_parameter_is_refused() -> None:
    class Drifting(Tuned):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
            return super().loss(model, batch)

    learner = learner_of(Drifting(), update={"rule": "async-local-sgd"})

    with pytest.raises(SpecError, match=r"task: 0\.weight of the model is frozen, but training"):
        train(learner, base_of(0.0, 0, 0))


def test_a_base_with_other_values_is_refused_by_name() -> None:
    class Other(Tuned):
        def model(self) -> nn.Module:
            model = super().model()
            with torch.no_grad():
                model[0].weight[2] += 1e-3
            return model

    facts = learner_of(Tuned()).facts(1)

    learner_of(Tuned()).check_against(facts)
    with pytest.raises(MachineDiffers, match=r"task: 0\.weight of the base model has other values"):
        learner_of(Other()).check_against(facts)
    with pytest.raises(MachineDiffers, match=r"other parameters on this machine .* example weight"):
        learner_of().check_against(facts)


def test_the_first_snapshot_needs_no_second_model() -> None:
    class Counting(Tuned):
        built = 0

        def model(self) -> nn.Module:
            Counting.built += 1
            return super().model()

    learner = learner_of(Counting(), update={"rule": "async-local-sgd"})
    first, _ = learner.initial()
    assert Counting.built == 1

    # Once the model was trained, its initial values have to be built again.
    train(learner, base_of(0.0, 0, 0))
    assert torch.equal(learner.initial()[0], first)
    assert Counting.built == 2


@pytest.mark.parametrize(
    ("tuned", "update", "momentum"),
    [(True, -3.375, 0.25), (False, -2.5, None)],
    ids=["tuned", "as the user gave it"],
)
def test_momentum_is_lowered_by_the_momentum_of_asynchrony(
    tuned: bool, update: float, momentum: float | None
) -> None:
    learner = learner_of(
        WithMomentum(), update={"rule": "async-local-sgd"}, tuning={"momentum": tuned}
    )

    trained = train(learner, base_of(10.0), asynchrony=0.25)

    # The second step also takes the first one's part; tuned steps are half as long again.
    assert trained.update.item() == update
    assert trained.momentum == momentum


@pytest.mark.parametrize("push_every", ["subtask", 2])
@pytest.mark.parametrize(("share", "stop"), [(1.0, 4), (0.5, 2), (0.1, 2)])
def test_a_share_of_an_interval_is_whole_steps(
    push_every: str | int, share: float, stop: int
) -> None:
    learner = learner_of(push_every=push_every, update={"rule": "vc-asgd"})

    assert learner.interval_stop(0, 0, share) == stop


def test_a_worker_uses_the_recorded_number_of_subtasks() -> None:
    # Given the first worker, whose task reads its batch size from its machine
    first, other = Slope(), Slope()
    first.batch_size, other.batch_size = 1, 4
    facts = learner_of(first, subtasks_per_epoch=None).facts(1)
    assert (facts.batch_size, facts.subtasks_per_epoch) == (1, 2)

    # When another worker joins
    second = learner_of(other, subtasks_per_epoch=None)
    assert second.plan.subtasks_per_epoch == 1
    second.check_against(facts)

    # Then both leases are the same
    assert second.plan.subtasks_per_epoch == 2


def test_facts_without_a_number_of_subtasks_leave_the_specified_one() -> None:
    facts = replace(learner_of().facts(1), batch_size=None, subtasks_per_epoch=None)

    learner = learner_of()
    learner.check_against(facts)

    assert learner.plan.subtasks_per_epoch == 2


class Drawn(Dataset[Tensor]):
    """Samples that differ, with noise."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + float(torch.rand(()))])


class Loaded(Slope):
    """Records which samples were trained."""

    def __init__(self, workers: int) -> None:
        self.loader_workers = workers
        self.trained: list[float] = []

    def dataset(self, split: str) -> Dataset[Tensor]:
        return Drawn()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.trained += batch.flatten().tolist()
        return super().loss(model, batch)


def trained_with(workers: int, *, stop_after: int | None = None) -> list[float]:
    """Train both subtasks of an epoch in intervals of two steps, if need be with a stop."""
    task = Loaded(workers)
    learner = learner_of(task, push_every=2, update={"rule": "async-local-sgd"})
    try:
        for subtask in (0, 1):
            start = 0
            while start < learner.plan.size(subtask):
                stop = learner.interval_stop(subtask, start)
                start = learner.train(
                    *(base_of(0.0), subtask, start, stop),
                    after_step=lambda: len(task.trained) == stop_after,
                ).stop
    finally:
        learner.close()
    return task.trained


def test_loader_processes_change_neither_samples_nor_their_order_nor_noise() -> None:
    samples = trained_with(2)

    assert [int(each) for each in samples] == [int(each) for each in trained_with(0)]
    assert sorted(int(each) for each in samples) == list(range(40))
    # Their noise depends on neither the number of processes nor on a stop inside an interval.
    assert samples == trained_with(1, stop_after=6)
