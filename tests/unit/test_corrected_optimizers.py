"""Optimizers of workers that share a batch, against those of one process with the whole batch.

A round is a step of each worker, and then all continue from the mean of their copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam, RMSprop, SparseAdam

from vcasgd.learning.local_moments import LocalMoments
from vcasgd.worker.gpus import best_device

ROWS, WORKERS, STEPS = 400, 4, 60
DEVICE = best_device()
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Gentle(Adam):
    """A subclass without a step of its own."""


class OwnStep(AdamW):
    """A subclass whose ``exp_avg`` it may use otherwise."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Lion(Optimizer):
    """Chen et al. 2023: the sign of a mean of gradients. Its state is ``exp_avg``, as Adam's."""

    def __init__(self, parameters: Iterable[nn.Parameter], **group: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99), **group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                mean = self.state[each].setdefault("exp_avg", torch.zeros_like(each))
                self.state[each].setdefault("exp_avg_sq", torch.zeros_like(each))
                each.sub_(mean.lerp(each.grad, 0.1).sign_(), alpha=group["lr"])
                mean.lerp_(each.grad, 0.01)


#: Optimizers that train as one process does.
CORRECTED: dict[str, MakeOptimizer] = {
    "sgd": lambda each: SGD(each, lr=0.05, momentum=0.9),
    "sgd without momentum": lambda each: SGD(each, lr=0.05),
    "sgd with nesterov": lambda each: SGD(
        each, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adam": lambda each: Adam(each, lr=0.01),
    "adam with weight decay": lambda each: Adam(each, lr=0.01, weight_decay=1.0),
    "adam that maximizes": lambda each: Adam(each, lr=0.01, maximize=True),
    "adam with foreach": lambda each: Adam(each, lr=0.01, foreach=True),
    "adam, fused": lambda each: Adam(each, lr=0.01, fused=True),
    "adam with tensors": lambda each: Adam(
        each, lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.999)), foreach=False
    ),
    "adamw": lambda each: AdamW(each, lr=0.01, weight_decay=0.1),
    "adamw, fused": lambda each: AdamW(each, lr=0.01, weight_decay=0.1, fused=True),
    "a subclass": lambda each: Gentle(each, lr=0.01),
    # Only on a GPU
    **({"adam, capturable": lambda each: Adam(each, lr=0.01, capturable=True),
        "adamw, capturable": lambda each: AdamW(each, lr=0.01, capturable=True)}
       if torch.cuda.is_available() else {}),
}  # fmt: skip

#: Optimizers that are left alone, with their names in the event.
LEFT_ALONE: dict[str, MakeOptimizer] = {
    "Adam with amsgrad": lambda each: Adam(each, lr=0.01, amsgrad=True),
    "Adam with a beta of 0": lambda each: Adam(each, lr=0.01, betas=(0.0, 0.999)),
    "AdamW with a beta of 0": lambda each: AdamW(each, lr=0.01, betas=(0.9, 0.0)),
    "RAdam": lambda each: RAdam(each, lr=0.01),
    "RMSprop": lambda each: RMSprop(each, lr=0.01, momentum=0.5),
    "SparseAdam": lambda each: SparseAdam(list(each), lr=0.01),
    "OwnStep": lambda each: OwnStep(each, lr=0.01),
    "Lion": lambda each: Lion(each),
}


class Process:
    def __init__(self, make: MakeOptimizer, *, sparse: bool = False) -> None:
        ones = torch.ones(ROWS, 2, device=DEVICE)
        self.model = nn.Embedding.from_pretrained(ones, freeze=False, sparse=sparse)
        self.optimizer = make(self.model.parameters())

    def step(self, noise: Tensor) -> None:
        """Make a step with this ``noise`` in the gradient of the first rows, float32 [rows, 2]."""
        self.optimizer.zero_grad()
        rows = self.model(torch.arange(len(noise), device=DEVICE))
        (rows * (2.0 + noise)).sum().backward()
        self.optimizer.step()


class Workers:
    def __init__(self, make: MakeOptimizer, *, sparse: bool = False) -> None:
        self.all = [Process(make, sparse=sparse) for _ in range(WORKERS)]
        self.moments = [LocalMoments(each.optimizer) for each in self.all]
        for each in self.moments:
            each.follow(1 / WORKERS)

    @torch.no_grad()
    def average(self) -> None:
        copies = [each.model.weight for each in self.all]
        mean = torch.stack(copies).mean(0)
        for each in copies:
            each.copy_(mean)

    def round(self, noise: Tensor) -> None:
        """Make a round with the noise of each worker, float32 [workers, rows, 2]."""
        for worker, own in zip(self.all, noise, strict=True):
            worker.step(own)
        self.average()


def noises(rows: int = ROWS) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    drawn = (torch.randn(WORKERS, rows, 2, generator=random) for _ in range(STEPS))
    return [2 * each.to(DEVICE) for each in drawn]


@torch.no_grad()
def difference(one: Workers, other: Process) -> float:
    """Return the difference of what both trained, relative to it."""
    trained = other.model.weight - 1
    return float((one.all[0].model.weight - other.model.weight).norm() / trained.norm())


@pytest.mark.parametrize("name", CORRECTED)
@pytest.mark.ci
def test_several_workers_train_as_one_process(name: str) -> None:
    one, workers = Process(CORRECTED[name]), Workers(CORRECTED[name])

    for noise in noises():
        one.step(noise.mean(0))
        workers.round(noise)

    # Without the correction, Adam differs by 0.15 and more
    assert difference(workers, one) < (1e-5 if name.startswith("sgd") else 0.08)
    assert not any(each.uncorrected for each in workers.moments)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rows_without_a_gradient_train_as_in_one_process(momentum: float) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.05, momentum=momentum)

    one, workers = Process(make, sparse=True), Workers(make, sparse=True)

    for noise in noises(ROWS // 2)[:20]:
        one.step(noise.mean(0))
        workers.round(noise)

    assert difference(workers, one) < 1e-5
    assert bool((workers.all[0].model.weight[ROWS // 2 :] == 1).all())


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_optimizers_are_left_alone_and_named(name: str) -> None:
    sparse = name == "SparseAdam"
    alone, worker = (Process(LEFT_ALONE[name], sparse=sparse) for _ in range(2))
    moments = LocalMoments(worker.optimizer)

    for at, noise in enumerate(noises(ROWS // 2)[:15]):
        # Only the second moments of a variant of Adam are left alone
        moments.follow(0.25 if " with " in name else (1.0, 0.25, 0.5)[at // 5])
        for each in (alone, worker):
            each.step(noise[0])

    assert torch.equal(worker.model.weight, alone.model.weight)
    assert bool(worker.model.weight.isfinite().all())
    assert moments.uncorrected == name


def test_a_sparse_gradient_of_adam_has_the_error_of_torch() -> None:
    worker = Process(CORRECTED["adam"])
    moments = LocalMoments(worker.optimizer)
    moments.follow(0.25)
    worker.step(noises()[0][0])
    worker.model.sparse = True

    with pytest.raises(RuntimeError, match="consider SparseAdam instead"):
        worker.step(noises()[1][0])


def test_a_closed_correction_leaves_its_optimizer_alone() -> None:
    """An optimizer was used before, as that of a script after a rollback."""
    worker, again = Process(CORRECTED["adam"]), Process(CORRECTED["adam"])
    old = LocalMoments(again.optimizer)
    old.follow(0.25)
    old.close()

    for each in (worker, again):
        LocalMoments(each.optimizer).follow(0.25)
        for noise in noises()[:20]:
            each.step(noise[0])

    assert torch.equal(worker.model.weight, again.model.weight)
