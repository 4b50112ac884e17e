"""A worker's part in the rounds of its job."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vcasgd.store.tensors.snapshot import RoundFacts
from vcasgd.worker.interval import Base
from vcasgd.worker.member import Member


def base_of(workers: int, version: int = 1) -> Base:
    """Return the base of a round of ``workers`` with a job's batch of 32 in all."""
    facts = RoundFacts(workers=workers, batch=32 * bool(workers), step_seconds=0.01)
    return Base(torch.empty(0), torch.empty(0), version=version, round=facts)


def test_second_moments_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(200))
    optimizer = torch.optim.Adam([parameter], lr=0.01)
    member = Member(32, 4, steps=2)
    member.use(optimizer)
    member.measure(0.01)

    for version in range(100):
        member.follow(base_of(4, version))
        member.begin()
        for _ in range(4):
            parameter.grad = torch.randn(200)
            optimizer.step()

    second = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.999**400)
    assert float(second.mean()) == pytest.approx(1 / 4, rel=0.1)


@pytest.mark.parametrize(
    ("workers", "fixed", "samples"),
    [(0, False, 64), (1, False, 3200), (1, True, 64), (2, False, 64)],
    ids=["nobody yet", "alone", "alone, with push_every", "two"],
)
def test_a_worker_pushes_less_often_while_it_is_alone(
    workers: int, fixed: bool, samples: int
) -> None:
    """One that makes 100 local steps in a second, with its batch of 32."""
    member = Member(32, 1, steps=2, fixed=fixed)
    member.measure(0.01)
    member.follow(base_of(workers))

    assert member.interval_stop(0, 32_000) == samples


def test_intervals_of_a_subtask_are_equal() -> None:
    member = Member(32, 1, steps=2)

    stops = [0]
    while stops[-1] < 200:
        stops.append(member.interval_stop(stops[-1], 200))

    assert stops == [0, 67, 134, 200] or stops == [0, 67, 133, 200]
