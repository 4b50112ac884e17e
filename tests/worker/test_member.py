"""A worker's part in the rounds of its job."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vcasgd.learning.vector import Layout, gather
from vcasgd.store.tensors.snapshot import RoundFacts
from vcasgd.worker.interval import Base
from vcasgd.worker.member import Member


def second_moment_of(*, complete: bool) -> tuple[Tensor, float]:
    """Train noise in rounds that don't move the model; return Adam's v, and the mean square."""
    torch.manual_seed(0)
    model = nn.Linear(50, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    layout = Layout.of(model)
    floats, integers = torch.empty(layout.floats), torch.empty(0, dtype=torch.int64)
    gather(model, layout, floats, integers)
    member = Member(32, 4, layout, complete=complete)
    member.use(optimizer)
    squares = torch.zeros(50)
    for version in range(100):
        facts = RoundFacts(base=max(version - 1, 0), samples=128, workers=4, batch=32)
        member.begin(Base(floats, integers, version=version, round=facts), model)
        for _ in range(4):
            model.weight.grad = torch.randn(1, 50)
            squares += model.weight.grad[0].square()
            optimizer.step()
    state = optimizer.state[model.weight]
    return state["exp_avg_sq"][0] / (1 - 0.999**400), float(squares.mean() / 400)


def test_second_moments_are_those_of_the_whole_batch() -> None:
    second, square = second_moment_of(complete=True)

    assert float(second.mean()) < 0.5 * square


def test_nothing_follows_from_sparse_updates() -> None:
    second, square = second_moment_of(complete=False)

    assert abs(float(second.mean()) / square - 1) < 0.1
