"""The optimizer's state of workers that share a batch, against one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from vcasgd.learning.local_moments import LocalMoments

WORKERS, SIZE = 4, 500

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adam": lambda parameters: Adam(parameters, lr=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "nesterov": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
}


class Workers:
    """Workers that train a quadratic with noisy gradients, in rounds of ``steps`` local steps."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer], noise: float) -> None:
        torch.manual_seed(0)
        self.copies = [nn.Parameter(torch.ones(SIZE)) for _ in range(WORKERS)]
        self.optimizers = [make([copy]) for copy in self.copies]
        self.moments = [LocalMoments(optimizer) for optimizer in self.optimizers]
        self._noise = noise

    def state(self, worker: int = 0) -> dict[str, Any]:
        return self.optimizers[worker].state[self.copies[worker]]

    def round(self, steps: int) -> list[Tensor]:
        """Train a round; return the mean gradient of each step."""
        start = self.copies[0].detach().clone()
        for moments in self.moments:
            moments.begin(1 / WORKERS, steps)
        gradients = [self._step() for _ in range(steps)]
        mean = torch.stack([copy.detach() for copy in self.copies]).mean(0)
        for moments, copy in zip(self.moments, self.copies, strict=True):
            moments.end({copy: (mean - start, start)})
            with torch.no_grad():
                copy.copy_(mean)
        return gradients

    def _step(self) -> Tensor:
        for copy, optimizer in zip(self.copies, self.optimizers, strict=True):
            copy.grad = copy.detach() + self._noise * torch.randn(SIZE)
            optimizer.step()
        return torch.stack([copy.grad for copy in self.copies if copy.grad is not None]).mean(0)


def momentum(state: dict[str, Any]) -> Tensor:
    result: Tensor = state["exp_avg" if "exp_avg" in state else "momentum_buffer"]
    return result.clone()


def expected(name: str, start: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return the momentum of one process that makes these steps."""
    for gradient in gradients:
        start = 0.9 * start + (0.1 if "adam" in name else 1.0) * gradient
    return start


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_momentum_is_nearly_that_of_one_process(name: str) -> None:
    workers = Workers(OPTIMIZERS[name], noise=1.0)
    for _ in range(60):
        workers.round(4)
    before = momentum(workers.state())

    gradients = workers.round(4)

    wanted = expected(name, before, gradients)
    # That of a worker's own gradients has twice the noise of all, and remembers it for long.
    assert distance(momentum(workers.state()), wanted) < 0.5
    assert distance(momentum(workers.state(1)), momentum(workers.state())) < 0.2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_follows_from_the_motion_alone(name: str) -> None:
    """Without noise; the gradient changes a little during the round."""
    workers = Workers(OPTIMIZERS[name], noise=0.0)
    workers.round(2)
    before = momentum(workers.state())

    gradients = workers.round(2)

    assert distance(momentum(workers.state()), expected(name, before, gradients)) < 0.06


def test_steps_are_as_long_as_with_the_whole_batch() -> None:
    """The gradients of one process have 1/4 of the variance, and are all noise in the end."""
    workers = Workers(OPTIMIZERS["adam"], noise=1.0)
    with torch.no_grad():
        for copy in workers.copies:
            copy.zero_()

    for _ in range(150):
        workers.round(4)

    state = workers.state()
    second = state["exp_avg_sq"] / (1 - 0.999 ** int(state["step"]))
    assert float(second.median()) == pytest.approx(1 / WORKERS, rel=0.25)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_worker_with_the_whole_batch_does_the_same_as_one_process(name: str) -> None:
    copies = [nn.Parameter(torch.ones(SIZE)) for _ in range(2)]
    alone, plain = (OPTIMIZERS[name]([copy]) for copy in copies)
    moments = LocalMoments(alone)
    torch.manual_seed(0)

    for _ in range(20):
        moments.begin(1.0, 4)
        gradient = torch.randn(SIZE)
        for copy, optimizer in zip(copies, (alone, plain), strict=True):
            copy.grad = gradient.clone()
            optimizer.step()
        moments.end({})

    assert torch.equal(copies[0], copies[1])


def test_the_second_moment_stays_when_the_others_leave() -> None:
    workers = Workers(OPTIMIZERS["adam"], noise=1.0)
    for _ in range(30):
        workers.round(4)
    before = workers.state()["exp_avg_sq"].mean()

    workers.moments[0].begin(1.0, 4)
    workers._step()

    assert float(workers.state()["exp_avg_sq"].mean()) == pytest.approx(float(before), rel=0.2)


def test_other_optimizers_stay_as_they_are() -> None:
    workers = Workers(lambda parameters: RMSprop(parameters, lr=0.01), noise=1.0)
    before = workers.round(2) and workers.state()["square_avg"].clone()

    workers.moments[0].end({workers.copies[0]: (torch.ones(SIZE), torch.ones(SIZE))})

    assert torch.equal(workers.state()["square_avg"], before)
