"""Events of what several workers do otherwise than one process, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.test_buffers import Queued, facts_of
from support.compat import Points, script
from torch import nn
from torch.optim import Optimizer

pytestmark = pytest.mark.usefixtures("one_thread")


class Momentum(Points):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class WithoutMomentum(Points):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


class Clipping(Points):
    clip_norm = 1.0


class ShortParts(Queued):
    min_local_batch = 2


HALF = {"update": {"rule": "rounds", "codec": "bfloat16"}}


@pytest.mark.parametrize(
    ("task", "fields", "kinds"),
    [
        (Points, {}, []),
        (WithoutMomentum, {}, []),
        (Momentum, {}, ["state-starts-again"]),
        (Clipping, {}, []),
        (Clipping, HALF, ["clip-approximated"]),
        (Queued, {}, []),
        (ShortParts, {}, ["buffers-averaged"]),
        (Queued, {"batch": "worker"}, ["buffers-averaged"]),
    ],
)
def test_what_is_approximated_is_noted(
    task: type[Points], fields: dict[str, Any], kinds: list[str]
) -> None:
    assert list(facts_of(task(), **fields).notes) == kinds


class Bucketed(WithoutMomentum):
    """Batches of a sampler of their own."""

    def sampler(self, dataset: Any) -> Any:
        return [list(range(start, start + 64)) for start in range(0, len(dataset), 64)]


@pytest.mark.parametrize(("fields", "kinds"), [({}, ["batches-mixed"]), ({"batch": "worker"}, [])])
def test_batches_of_a_sampler_that_are_mixed_are_noted(
    fields: dict[str, Any], kinds: list[str]
) -> None:
    assert list(facts_of(Bucketed(), **fields).notes) == kinds


def test_one_worker_approximates_nothing() -> None:
    assert not facts_of(Momentum(), workers=1).notes


CLIPS = """
import sys

import torch
import vcasgd

sys.path.insert(0, {tests!r})
from support.compat import Points

points = Points()
model = points.model()
optimizer = points.optimizer(model.parameters())
session = vcasgd.Session(model, optimizer)


@session.evaluation(points.dataset("validation"))
def judge(model, batch):
    return points.evaluate(model, batch)


for batch in session.loader(points.dataset("train"), batch_size=64):
    optimizer.zero_grad()
    points.loss(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


def test_a_loop_that_clips_by_itself_is_noted(tmp_path: Path) -> None:
    task = script(CLIPS.format(tests=str(Path(__file__).parents[1])), tmp_path)()

    assert list(facts_of(task).notes) == ["loop-clips"]
