"""The state of a rule is published with the weights, and survives every failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.world import MakeWorld, World
from torch import Tensor

from vcasgd.learning.rules import Context, make_rule
from vcasgd.parameter_server.shard import Shard
from vcasgd.spec.job import JobSpec

RULE: dict[str, Any] = {"rule": "sma", "moving_rate": 0.5, "momentum": 0.5}
DECAY = 0.75
#: subtask and samples of each push; with the sixth the first epoch is complete
PUSHES = [(0, 0, 2), (1, 0, 2), (0, 2, 4), (2, 0, 2), (1, 2, 4), (2, 2, 4), (3, 0, 2), (4, 0, 4)]


def numbers(push: int, floats: int) -> Tensor:
    return torch.linspace(-1, 1, floats) * (push + 1)


def expected(spec: JobSpec, floats: int, pushes: int) -> tuple[Tensor, Tensor]:
    """Weights and rule state of a run without failures."""
    weights, state = torch.zeros(floats), torch.zeros(floats)
    for push in range(pushes):
        context = Context(0, 1 + push // 6, floats - 1, state)
        make_rule(spec.update).blend(weights, numbers(push, floats), context)
    return weights, state


def expected_average(floats: int, pushes: int) -> tuple[Tensor, Tensor]:
    """Weights and their average of a run without failures: a push is one step of two samples."""
    weights, average = torch.zeros(floats), torch.zeros(floats)
    for push in range(pushes):
        update, samples = numbers(push, floats), PUSHES[push][2] - PUSHES[push][1]
        weights[:-1] += update[:-1]
        weights[-1] = (weights[-1] + update[-1]) / 2
        average.lerp_(weights, 1 - DECAY ** (samples / 2))
        average[-1] = weights[-1]
    return weights, average


def push(world: World, shard: Shard, numbered: int) -> None:
    subtask, start, stop = PUSHES[numbered]
    vector = numbers(numbered, world.layout.floats)
    world.push(subtask, start, stop, vector=vector, base=numbered)
    assert shard.turn() == 1


def server_lost(world: World, shard: Shard) -> Shard:
    return world.shard()


def tensors_lost(world: World, shard: Shard) -> Shard:
    world.lose_tensors()
    for _ in range(2):
        assert shard.turn() == 0
    assert world.events("republished")
    return shard


def both_lost(world: World, shard: Shard) -> Shard:
    world.checkpoint()
    world.lose_tensors()
    again = world.started_shard()
    assert world.events("restored")
    return again


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("accident", [server_lost, tensors_lost, both_lost])
def test_training_goes_on_as_if_nothing_had_happened(
    make_world: MakeWorld,
    codec: str,
    accident: Callable[[World, Shard], Shard],
) -> None:
    world = make_world(update={**RULE, "codec": codec})
    shard, floats = world.shard(), world.layout.floats
    for numbered in range(2):
        push(world, shard, numbered)
    before = world.snapshots.fetch_state(world.snapshots.read().meta)

    shard = accident(world, shard)
    for numbered in range(2, len(PUSHES)):
        push(world, shard, numbered)

    weights, state = expected(world.spec, floats, len(PUSHES))
    remembered = world.snapshots.fetch_state(world.snapshots.read().meta)
    assert before is not None
    assert bool(before.any())
    assert remembered is not None
    near = {"rtol": 0.02, "atol": 0.02} if codec == "bfloat16" else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(remembered, state, **near)
    torch.testing.assert_close(world.vector(), weights, **near)


@pytest.mark.parametrize("accident", [server_lost, tensors_lost, both_lost])
def test_the_average_of_the_model_goes_on(
    make_world: MakeWorld, accident: Callable[[World, Shard], Shard]
) -> None:
    world = make_world(update={"rule": "async-local-sgd", "eta": 1.0}, ema=DECAY)
    shard, floats = world.shard(), world.layout.floats
    for numbered in range(2):
        push(world, shard, numbered)

    shard = accident(world, shard)
    for numbered in range(2, len(PUSHES)):
        push(world, shard, numbered)

    weights, average = expected_average(floats, len(PUSHES))
    remembered = world.snapshots.fetch_state(world.snapshots.read().meta)
    assert remembered is not None
    torch.testing.assert_close(world.vector(), weights)
    torch.testing.assert_close(remembered, average)


def test_nothing_of_an_older_version_stays(make_world: MakeWorld) -> None:
    world = make_world(update=RULE)
    shard = world.shard()
    for numbered in range(4):
        push(world, shard, numbered)

    chunks = world.tensor_keys("s:")

    assert chunks == {f"s:{version}.1:{name}" for version in (3, 4) for name in ("0", "r0")}
