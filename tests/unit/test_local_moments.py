"""Adam's second moments of a worker with a part of the batch, against those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from vcasgd.learning import local_moments
from vcasgd.learning.local_moments import LocalMoments

SIZE, WORKERS = 500, 4

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adam": lambda parameters: Adam(parameters, lr=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "amsgrad": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
}
each_adam = pytest.mark.parametrize("name", ["adam", "adamw"])


class Training:
    """Training with gradients that are given, not those of a model."""

    def __init__(self, name: str, share: float | None) -> None:
        """``share`` is None without the correction."""
        self.parameter = nn.Parameter(torch.ones(SIZE))
        self.optimizer = OPTIMIZERS[name]([self.parameter])
        self.moments = None if share is None else LocalMoments(self.optimizer)
        if self.moments is not None and share is not None:
            self.moments.share = share
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


@each_adam
@pytest.mark.parametrize(
    ("signal", "noise"), [(0.0, 1.0), (1.0, 0.0), (1.0, 2.0)], ids=["noise", "signal", "both"]
)
def test_second_moments_are_those_of_the_whole_batch(
    name: str, signal: float, noise: float
) -> None:
    """The mean of the gradients of a whole batch has 1/4 of the variance."""
    worker = Training(name, share=1 / WORKERS)

    worker.run(600, signal, noise)

    wanted = signal**2 + noise**2 / WORKERS
    assert float(worker.second.mean()) == pytest.approx(wanted, rel=0.1)


@each_adam
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


@pytest.mark.parametrize("name", ["sgd", "amsgrad"])
def test_other_optimizers_stay_as_they_are(name: str) -> None:
    one, other = Training(name, share=1 / WORKERS), Training(name, share=None)

    for each in (one, other):
        torch.manual_seed(1)
        each.run(20, 0.5, 1.0)

    assert torch.equal(one.parameter, other.parameter)


@each_adam
def test_they_change_gradually_when_others_join_and_leave(name: str) -> None:
    worker = Training(name, share=1.0)
    assert worker.moments is not None
    worker.run(300, 1.0, 1.0)

    for share in (0.5, 1.0):
        before = worker.second.mean()
        worker.moments.share = share
        worker.run(5, 1.0, 1.0)

        assert float(worker.second.mean()) == pytest.approx(float(before), rel=0.1)


@each_adam
def test_large_parameters_are_corrected_in_pieces(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Training(name, share=1 / WORKERS)
    whole.run(20, 1.0, 2.0)

    monkeypatch.setattr(local_moments, "PIECE", 64)
    pieces = Training(name, share=1 / WORKERS)
    pieces.run(20, 1.0, 2.0)

    assert torch.equal(pieces.second, whole.second)
    assert torch.equal(pieces.parameter, whole.parameter)
