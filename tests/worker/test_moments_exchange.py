"""Workers share second moments through real store nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.waiting import await_truth
from torch import nn

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.sharded import SharedMoments
from vcasgd.worker.member import MIN_STEPS, Member
from vcasgd.worker.moments_exchange import MomentsExchange

JOB, SIZE = "job", 700_000  # more than one chunk


class Adaptive:
    """A worker's part of a job with Adam, and its connection to the others."""

    def __init__(self, node: RedisClient, name: str) -> None:
        self.parameter = nn.Parameter(torch.zeros(SIZE))
        self.optimizer = torch.optim.Adam([self.parameter])
        self.member = Member(32, 2, steps=1)
        self.member.use(self.optimizer)
        self.exchange = MomentsExchange([node], JOB, name)
        self.exchange.open(1)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.parameter.grad = torch.full((SIZE,), 2.0)
            self.optimizer.step()

    @property
    def second(self) -> float:
        """One of the second moments, with its bias."""
        return float(self.optimizer.state[self.parameter]["exp_avg_sq"][SIZE - 1])


@pytest.fixture
def worker(tensors: RedisClient) -> Callable[[str], Adaptive]:
    return lambda name: Adaptive(tensors, name)


def test_a_new_worker_takes_over_what_another_shared(
    worker: Callable[[str], Adaptive], tensors: RedisClient
) -> None:
    old, new = worker("old"), worker("new")
    new.exchange.adopt(new.member, 0)
    assert new.member.lacking == SIZE, "there is nothing to take over yet"

    old.step(MIN_STEPS)

    def shared() -> bool:
        old.exchange.share(old.member, 0)
        return SharedMoments([tensors], JOB, 1).read(SIZE, 0) is not None

    await_truth(shared)
    new.exchange.adopt(new.member, 0)

    assert new.member.lacking == 0
    assert new.second == pytest.approx(old.second, rel=0.01)


def test_only_one_worker_writes_at_a_time(tensors: RedisClient) -> None:
    moments = SharedMoments([tensors], JOB, 1)

    turns = [moments.take_turn(name, seconds=60) for name in ("a", "b", "c")]

    assert turns == [True, False, False]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", b""),
        ("steps", b"0:0"),
        ("steps", b"1:20"),
        ("steps", b"0:-5"),
        ("steps", b"0:" + b"9" * 400),
        ("h0", b"short"),
        ("h1", None),
        ("h0", b"\xff" * (1 << 20)),
    ],
    ids=["no steps", "zero", "other rollback", "negative", "huge", "length", "missing", "NaN"],
)
def test_what_a_hostile_worker_wrote_is_left_out(
    worker: Callable[[str], Adaptive],
    tensors: RedisClient,
    key: str,
    value: bytes | None,
) -> None:
    SharedMoments([tensors], JOB, 1).write(torch.ones(SIZE).bfloat16(), MIN_STEPS, 0)
    name, new = TensorKeys(JOB).moments(key), worker("new")
    if value is None:
        assert tensors.delete(name)
    else:
        tensors.set(name, value)

    new.exchange.adopt(new.member, 0)

    assert new.member.lacking == SIZE
    new.step()
