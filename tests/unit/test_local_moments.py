"""Moments of a worker with a part of the batch, and those that it takes over from another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from vcasgd.learning import local_moments, second_moments
from vcasgd.learning.local_moments import FIRST_MOMENTS, LocalMoments

SIZE, WORKERS = 500, 4

Make = Callable[[list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda parameters: Adam(parameters, lr=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "amsgrad": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
}


class Training:
    """Training with gradients that are given, not those of a model."""

    def __init__(self, name: str, share: float | None) -> None:
        """``share`` is None without the correction."""
        self.parameter = nn.Parameter(torch.ones(SIZE))
        self.optimizer = OPTIMIZERS[name]([self.parameter])
        self.moments = None if share is None else LocalMoments(self.optimizer)
        if self.moments is not None and share is not None:
            self.moments.follow(share)
        torch.manual_seed(0)

    def run(self, steps: int, signal: float, noise: float) -> None:
        for _ in range(steps):
            self.parameter.grad = signal + noise * torch.randn(SIZE)
            self.optimizer.step()

    @property
    def second(self) -> Tensor:
        """Adam's mean of squared gradients."""
        state = self.optimizer.state[self.parameter]
        mean: Tensor = state["exp_avg_sq"] / (1 - 0.999 ** int(state["step"]))
        return mean


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_they_are_never_less_than_the_noise_of_the_whole_batch(name: str) -> None:
    worker = Training(name, share=1 / WORKERS)

    worker.run(20, 0.0, 1.0)

    own = Training(name, share=None)
    own.run(20, 0.0, 1.0)
    assert bool((worker.second >= own.second / WORKERS * 0.999).all())
    assert bool((worker.second <= own.second * 1.001).all())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_worker_with_the_whole_batch_does_the_same_as_one_process(name: str) -> None:
    one, other = Training(name, share=1.0), Training(name, share=None)

    for each in (one, other):
        torch.manual_seed(1)
        each.run(20, 0.5, 1.0)

    assert torch.equal(one.parameter, other.parameter)


def test_they_change_gradually_when_others_join_and_leave() -> None:
    worker = Training("adam", share=1.0)
    assert worker.moments is not None
    worker.run(300, 1.0, 1.0)

    for share in (0.5, 1.0):
        before = worker.second.mean()
        worker.moments.follow(share)
        worker.run(5, 1.0, 1.0)

        assert float(worker.second.mean()) == pytest.approx(float(before), rel=0.1)


def test_large_parameters_are_corrected_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Training("adam", share=1 / WORKERS)
    whole.run(20, 1.0, 2.0)

    monkeypatch.setattr(local_moments, "PIECE", 64)
    pieces = Training("adam", share=1 / WORKERS)
    pieces.run(20, 1.0, 2.0)

    assert torch.equal(pieces.second, whole.second)
    assert torch.equal(pieces.parameter, whole.parameter)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_first_moments_of_all_workers_stay_as_they_are_when_shares_change(name: str) -> None:
    workers = [Training(name, share=share) for share in (0.5, 0.25, 0.25)]
    for worker in workers:
        worker.run(20, 1.0, 2.0)
    before = sum_of_firsts(workers)

    for worker, share in zip(workers, (0.2, 0.3, 0.5), strict=True):
        assert worker.moments is not None
        worker.moments.follow(share)

    torch.testing.assert_close(sum_of_firsts(workers), before)


def test_the_last_worker_follows_its_past_no_further_than_before() -> None:
    """Its gradients were a quarter of each step; without new ones, the rest of the way is that."""
    worker, alone = (Training("sgd", share=1 / WORKERS) for _ in range(2))
    ways = []
    for each, share in ((worker, 1 / WORKERS), (alone, 1.0)):
        torch.manual_seed(1)
        each.run(20, 0.0, 1.0)
        assert each.moments is not None
        each.moments.follow(share)
        start = each.parameter.detach().clone()
        each.run(50, 0.0, 0.0)
        ways.append(share * (each.parameter.detach() - start))

    assert float(ways[0].norm()) > 0.1
    torch.testing.assert_close(ways[1], ways[0])


def sum_of_firsts(workers: list[Training]) -> Tensor:
    """Return the sum of the workers' first moments, weighted by their shares."""
    total = torch.zeros(SIZE)
    for worker in workers:
        assert worker.moments is not None
        state = worker.optimizer.state[worker.parameter]
        first = next(state[each] for each in FIRST_MOMENTS if each in state)
        total += worker.moments.share * first
    return total


# --- second moments that one Adam takes over from another ---------------------------------------


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]


def step(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Make a step with gradients of 3."""
    for each in parameters:
        each.grad = torch.full_like(each, 3.0)
    optimizer.step()


def moments_of(optimizer: Optimizer) -> Tensor:
    out = torch.empty(second_moments.count(optimizer))
    second_moments.read(optimizer, out)
    return out


@pytest.mark.parametrize("make", [Adam, AdamW])
def test_an_optimizer_continues_with_the_moments_of_another(make: Make) -> None:
    mine, others = parameters(), parameters()
    new, old = make(mine), make(others)
    for _ in range(100):
        step(old, others)

    assert second_moments.adopt(new, moments_of(old), second_moments.steps(old))

    assert moments_of(old).tolist() == pytest.approx([9.0] * 10)
    assert moments_of(new).tolist() == pytest.approx([9.0] * 10)
    assert second_moments.steps(new) == 100
    step(new, mine)
    # The first moments have a tenth of the gradient, and the step is as short.
    assert mine[0].tolist()[0] == pytest.approx([-1e-3 * 0.1] * 3, rel=0.01)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (Adam, 10),
        (AdamW, 10),
        (lambda mine: Adam(mine, amsgrad=True), 0),
        (lambda mine: SGD(mine, lr=0.1, momentum=0.9), 0),
        (torch.optim.NAdam, 0),
    ],
    ids=["Adam", "AdamW", "AMSGrad", "SGD", "NAdam"],
)
def test_only_plain_adam_has_them(make: Make, count: int) -> None:
    assert second_moments.count(make(parameters())) == count


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-9, 1e31])
def test_values_that_no_second_moment_has_are_refused(bad: float) -> None:
    optimizer = Adam(parameters())
    moments = torch.ones(10)
    moments[7] = bad

    assert not second_moments.adopt(optimizer, moments, 100)
    assert second_moments.steps(optimizer) == 0


def test_a_parameter_without_gradients_gets_none() -> None:
    mine = parameters()
    old = Adam(mine)
    mine[0].grad = torch.ones_like(mine[0])
    old.step()
    new = Adam(others := parameters())

    assert second_moments.adopt(new, moments_of(old), 1)

    state: dict[str, Any] = new.state
    assert others[0] in state
    assert others[1] not in state
