"""The simulation of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import vcasgd
from vcasgd.bench.presence import Life, always, lives
from vcasgd.bench.simulation import Conditions, Outcome, Simulation
from vcasgd.errors import SpecError
from vcasgd.spec.job import JobSpec

SAMPLES, EPOCHS = 64, 3


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1,), 1.0)


class Downhill(vcasgd.Task):
    """Task whose local steps each subtract the learning rate from the only weight."""

    batch_size = 4

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def dataset(self, split: str) -> Dataset[Tensor]:
        return Numbers()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = model(batch).mean()
        return mean

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"weight": model(batch).sum(), "count": torch.tensor(len(batch))}


def simulate(machines: Sequence[Life], *, latency: float = 0.0, **job: Any) -> Outcome:
    fields = {
        "name": "simulated",
        "task": "t:T",
        "epochs": EPOCHS,
        "subtasks_per_epoch": 8,
        "push_every": 1,
        "update": {"rule": "async-local-sgd"},
        **job,
    }
    conditions = Conditions(machines, seconds_per_sample=1.0, latency=latency, seed=3)
    return Simulation(JobSpec.parse(fields), Downhill, conditions).run()


def test_one_worker_trains_sequentially() -> None:
    outcome = simulate(always(1))

    steps = SAMPLES // Downhill.batch_size
    assert [point.metrics["weight"] for point in outcome.points] == [-steps, -2 * steps, -3 * steps]
    assert [point.samples for point in outcome.points] == [SAMPLES, 2 * SAMPLES, 3 * SAMPLES]
    assert outcome.updates == EPOCHS * steps
    assert outcome.staleness == {"0": outcome.updates}
    assert outcome.bytes_pushed == 4 * outcome.updates


def test_several_workers_are_faster_and_stale() -> None:
    alone, together = simulate(always(1)), simulate(always(4))

    assert together.points[-1].metrics == alone.points[-1].metrics, "differences add up"
    assert 2.5 < together.staleness_mean < 3.1
    assert 3 < alone.seconds / together.seconds < 4.5


def test_latency_delays_updates() -> None:
    outcome = simulate(always(1), latency=5.0)

    assert outcome.points[-1].samples == EPOCHS * SAMPLES
    assert 0.5 < outcome.staleness_mean < 2


@pytest.mark.parametrize("push_every", [1, 2, "subtask"])
def test_every_sample_counts_once_despite_evictions(push_every: Any) -> None:
    outcome = simulate(lives([4, 1, 3, 0, 4] * 20, 9.0, seed=2), push_every=push_every)

    assert outcome.machines_lost > 5, "machines were evicted"
    assert outcome.samples_lost > 0
    assert outcome.points[-1].samples == EPOCHS * SAMPLES
    assert outcome.points[-1].metrics["weight"] == -EPOCHS * SAMPLES / Downhill.batch_size


def test_same_seed_gives_the_same_result() -> None:
    machines = lives([3, 1] * 50, 20.0, seed=2)

    assert simulate(machines).to_dict() == simulate(machines).to_dict()


def test_simulation_without_machines_is_an_error() -> None:
    with pytest.raises(SpecError, match="all machines are gone"):
        simulate([Life(0.0, 10.0)])
