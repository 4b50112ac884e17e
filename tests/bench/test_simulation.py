"""The simulation of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.compat import Points, plain
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import vcasgd
from vcasgd.errors import SpecError
from vcasgd.fleet.histories import Life, always, lives
from vcasgd.simulation.job import Conditions, Outcome, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.worker.member import OVERLAP_FROM

SAMPLES, EPOCHS = 64, 3
ROUNDS = {"rule": "rounds"}


class Downhill(vcasgd.Task):
    """Task whose local steps each subtract the learning rate from the only weight."""

    batch_size, weights = 4, 1

    def model(self) -> nn.Module:
        model = nn.Linear(1, self.weights, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def dataset(self, split: str) -> Any:
        return torch.ones(SAMPLES, 1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = model(batch).mean()
        return mean

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"weight": model(batch).sum(), "count": torch.tensor(len(batch))}


class LargeBatches(Downhill):
    """Task with enough samples in a batch for several workers."""

    batch_size = 16


class Overflowing(Downhill):
    """Task whose weight grows by the cube of itself in each step, soon to infinity."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = -((1 + model(batch).mean()) ** 4)
        return loss


def simulate(
    machines: Sequence[Life],
    *,
    make_task: Callable[[], vcasgd.Task] = Downhill,
    conditions: dict[str, Any] | None = None,
    **job: Any,
) -> Outcome:
    fields = {
        "name": "simulated",
        "task": "t:T",
        "epochs": EPOCHS,
        "subtasks_per_epoch": 8,
        "push_every": 1,
        "update": {"rule": "async-local-sgd"},
        **job,
    }
    values = {"seconds_per_sample": 1.0, "seed": 3, **(conditions or {})}
    return Simulation(JobSpec.parse(fields), make_task, Conditions(machines, **values)).run()


def test_one_worker_trains_sequentially() -> None:
    outcome = simulate(always(1))

    steps = SAMPLES // Downhill.batch_size
    assert [point.metrics["weight"] for point in outcome.points] == [-steps, -2 * steps, -3 * steps]
    assert [point.samples for point in outcome.points] == [SAMPLES, 2 * SAMPLES, 3 * SAMPLES]
    assert outcome.updates == EPOCHS * steps
    assert outcome.bytes_pushed == 4 * outcome.updates
    assert outcome.divergence is None
    # A worker fetches the next base while it trains, before it pushes.
    assert outcome.staleness == {"0": 1, "1": outcome.updates - 1}
    # The first two intervals have the same base, and the last one prefetches without need.
    assert outcome.bytes_fetched == 4 * outcome.updates


def test_several_workers_are_faster_and_stale() -> None:
    alone, together = simulate(always(1)), simulate(always(4))

    assert together.points[-1].metrics == alone.points[-1].metrics, "differences add up"
    assert 3.5 < together.staleness_mean < 4.5
    assert 3 < alone.seconds / together.seconds < 4.5


@pytest.mark.ci
@pytest.mark.parametrize("workers", [2, 4])
def test_late_updates_cost_no_rounds(workers: int) -> None:
    job = {"epochs": 100, "subtasks_per_epoch": 1, "max_epoch_lead": 5}
    conditions = {"spread": 0.3, "latency": 0.1}
    outcome = simulate(
        always(workers), make_task=LargeBatches, conditions=conditions, update=ROUNDS, **job
    )

    # Each round subtracts about one learning rate, as each batch of an ordinary loop does.
    steps = 100 * SAMPLES // LargeBatches.batch_size
    assert outcome.staleness.keys() > {"0"}, "no update was late"
    assert outcome.points[-1].metrics["weight"] == pytest.approx(-steps, rel=0.05)


@pytest.mark.ci
def test_exchanges_that_are_shorter_than_a_step_cost_no_time() -> None:
    def run(latency: float, **job: Any) -> Outcome:
        conditions = {"latency": latency, "seconds_per_sample": 0.25}
        return simulate(always(4), make_task=LargeBatches, conditions=conditions, update=ROUNDS,
                        epochs=50, subtasks_per_epoch=4, **job)  # fmt: skip

    # A step of a worker's part of the batch lasts one second.
    waiting, overlapping = run(0.8), run(0.8, push_every=None)

    early = OVERLAP_FROM * waiting.seconds
    assert overlapping.seconds < early + 0.65 * (waiting.seconds - early)
    late = overlapping.staleness["4"] / overlapping.updates
    assert 0.3 < late < 0.5, "from the middle of the job on, a base lacks the last round"
    assert waiting.staleness_mean < 0.5
    steps = 50 * SAMPLES // LargeBatches.batch_size
    assert overlapping.points[-1].metrics["weight"] == pytest.approx(-steps, rel=0.05)
    assert overlapping.points[-1].samples == 50 * SAMPLES
    # An exchange that is longer than a step isn't hidden.
    assert run(4.0, push_every=None).staleness_mean < 1


def test_machines_differ_in_speed() -> None:
    conditions = Conditions(always(1), speed_range=4.0, seed=1)
    speeds = [conditions.speed(nth) for nth in range(200)]

    assert speeds == [conditions.speed(nth) for nth in range(200)], "constant"
    assert 0.5 <= min(speeds) < 0.6
    assert 1.8 < max(speeds) <= 2.0
    assert Conditions(always(1)).speed(0) == 1
    alike, unlike = (
        simulate(always(1), conditions={"speed_range": ratio, "spread": 0.0})
        for ratio in (1.0, 4.0)
    )
    speed = Conditions(always(1), speed_range=4.0, seed=3).speed(0)
    assert unlike.seconds == pytest.approx(alike.seconds / speed)


def test_divergence_is_an_outcome() -> None:
    outcome = simulate(always(2), make_task=Overflowing)

    assert outcome.divergence is not None
    assert "loss is -inf" in outcome.divergence
    assert len(outcome.points) < EPOCHS


@pytest.mark.parametrize("push_every", [1, 2, "subtask"])
def test_every_sample_counts_once_despite_evictions(push_every: Any) -> None:
    outcome = simulate(lives([4, 1, 3, 0, 4] * 20, 9.0, seed=2), push_every=push_every)

    assert outcome.machines_lost > 5, "machines were evicted"
    assert outcome.samples_lost > 0
    assert outcome.points[-1].samples == EPOCHS * SAMPLES
    assert outcome.points[-1].metrics["weight"] == -EPOCHS * SAMPLES / Downhill.batch_size


def test_machines_are_paid_from_their_purchase_and_train_after_their_boot() -> None:
    from_the_start = simulate(always(2))
    booted = simulate([*always(2), Life(0.0, 40.0)], conditions={"boot_seconds": 50.0})

    assert booted.seconds == from_the_start.seconds + 50
    assert booted.machine_seconds == 2 * booted.seconds + 40
    assert (booted.machines_lost, booted.samples_lost) == (1, 0)


def test_same_seed_gives_the_same_result() -> None:
    machines = lives([3, 1] * 50, 20.0, seed=2)

    assert simulate(machines).to_dict() == simulate(machines).to_dict()


def test_simulation_without_machines_is_an_error() -> None:
    with pytest.raises(SpecError, match="all machines are gone"):
        simulate([Life(0.0, 10.0)])


class Noted(Points):
    batch_size, samples = 8, 50

    def __init__(self) -> None:
        self.models: list[Tensor] = []

    def schedule(self, progress: float) -> float:
        return 1 - progress

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.models.append(parameters_to_vector(model.parameters()).detach())
        return super().loss(model, batch)


@pytest.mark.parametrize("subtasks", [None, 3], ids=["default subtasks", "three"])
def test_one_worker_trains_like_an_ordinary_loop(subtasks: int | None) -> None:
    fields, made = {"subtasks_per_epoch": subtasks} if subtasks else {}, []

    def make_task() -> Noted:
        made.append(Noted())
        return made[-1]

    spec = JobSpec.parse(
        {"name": "points", "task": "t:T", "epochs": 4, "workers": {"max": 1}, **fields}
    )

    outcome = Simulation(spec, make_task, Conditions(always(1), 0.1, latency=0.1)).run()

    expected = plain(alone := Noted(), epochs=4, seed=0)["loss"]
    assert outcome.points[-1].metrics["loss"] == pytest.approx(expected, rel=1e-5)
    # Bit by bit: each step starts from the same model.
    steps = zip(made[-1].models, alone.models, strict=True)
    assert all(torch.equal(one, other) for one, other in steps)


class Wide(Downhill):
    weights = 1000


def test_workers_fetch_steps_in_the_encoding_of_pushes() -> None:
    whole, steps = (
        simulate(always(2), make_task=Wide, push_every=1, update={"codec": codec})
        for codec in ("float32", "int2")
    )

    assert steps.updates == whole.updates
    # Both fetch a whole model first, then one or two steps of two blocks of 128 bytes, packed.
    later = whole.bytes_fetched // 4000 - 2
    assert 30 * later <= steps.bytes_fetched - 2 * 4000 <= 2 * 256 * later
    # All weights move alike, so the encoding loses next to nothing.
    ends = [each.points[-1].metrics["weight"] for each in (steps, whole)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
