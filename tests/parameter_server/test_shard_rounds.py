"""Rounds in the parameter server's shard: the updates of all workers are one publication."""

from __future__ import annotations

import pytest
import torch
from support.waiting import await_truth
from support.world import MakeWorld, World

from vcasgd.parameter_server import round_members
from vcasgd.parameter_server.round_members import GRACE_INTERVALS
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import RoundFacts

ROUNDS = {"rule": "rounds"}
#: Duration of a local step that keeps a round open for as long as a test needs.
LONG = 20.0


def push(
    world: World,
    worker: str,
    subtask: int,
    start: int,
    stop: int,
    value: float,
    seconds: float = LONG,
    weight: float | None = None,
) -> Header:
    """Push an update that adds ``value`` to each parameter, with steps of ``seconds``."""
    delta = torch.full((world.layout.floats,), value)
    version = world.snapshots.version()
    header, _ = world.push(
        subtask, start, stop, vector=delta, worker=worker, update=f"{worker}.{subtask}.{start}",
        base=version or 0, batch=1.0, step_seconds=seconds, weight=weight,
    )  # fmt: skip
    return header


def turn_until(shard: Shard, version: int) -> None:
    """Wait for a round that ends without all of its workers."""
    await_truth(lambda: shard.turn() >= 0 and shard.version >= version)
    assert shard.version == version


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(update=ROUNDS)


def first_round(world: World) -> Shard:
    """Publish a round of the workers a and b."""
    shard = world.shard()
    push(world, "a", 0, 0, 1, 0.0, seconds=0.0)
    push(world, "b", 1, 0, 1, 0.0, seconds=0.0)
    turn_until(shard, 2)
    return shard


def test_the_mean_is_weighted_by_samples(world: World) -> None:
    shard = first_round(world)
    push(world, "a", 0, 1, 2, 4.0)
    push(world, "b", 1, 1, 4, 8.0)

    shard.turn()

    start = world.layout.parameters
    assert world.vector()[:start].tolist() == [7.0] * start
    meta = world.snapshots.read().meta
    assert (meta.version, meta.round.workers, meta.round.batch) == (4, 2, 2.0)


@pytest.mark.parametrize(
    ("weights", "mean"),
    [((1.0, 3.0), 7.0), ((0.5, 0.5), 6.0), ((0.0, 2.0), 8.0), ((0.0, 0.0), 0.0),
     ((1e15, 16.0), 6.0), ((None, 3.0), 7.0)],
    ids=["weights", "equal", "no-weight", "none-at-all", "far-too-heavy", "samples"],
)  # fmt: skip
def test_the_mean_is_weighted_by_batches_within_a_bound(
    world: World, weights: tuple[float | None, float | None], mean: float
) -> None:
    shard = first_round(world)
    push(world, "a", 0, 1, 2, 4.0, weight=weights[0])
    push(world, "b", 1, 1, 2, 8.0, weight=weights[1])

    shard.turn()

    start = world.layout.parameters
    assert world.vector()[:start].tolist() == pytest.approx([mean] * start)
    assert world.snapshots.read().meta.totals.samples == 4, "samples are counted, not weights"


def test_nothing_is_published_before_all_have_pushed(world: World) -> None:
    shard = first_round(world)
    header = push(world, "a", 0, 1, 2, 4.0)

    shard.turn()
    shard.turn()

    assert world.snapshots.version() == 2
    assert world.fate(header) == "pending"
    assert 0 < shard.due_in <= GRACE_INTERVALS * LONG
    push(world, "b", 1, 1, 2, 4.0)
    shard.turn()
    assert world.fate(header) == "applied"


def test_a_round_does_not_wait_for_a_lost_worker(world: World) -> None:
    shard = first_round(world)
    header = push(world, "a", 0, 1, 2, 4.0)
    shard.turn()
    assert world.fate(header) == "pending"

    shard.lose({"b"})
    shard.turn()

    assert world.fate(header) == "applied"
    assert world.snapshots.read().meta.round.workers == 1, "a takes over the part of b"
    assert world.vector()[0] == 4.0


def test_an_open_round_survives_its_parameter_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = first_round(world)
    push(world, "a", 0, 1, 2, 4.0, seconds=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(round_members, "MIN_GRACE", LONG)
        shard.turn()
    assert shard.version == 2

    # The successor doesn't know whom to expect.
    successor = world.shard(token=2)
    push(world, "b", 1, 1, 2, 8.0, seconds=0.0)
    turn_until(successor, 4)

    assert world.vector()[0] == 6.0
    assert world.positions() == {0: 2, 1: 2}


def test_a_snapshot_has_the_facts_of_its_round(world: World) -> None:
    shard = world.shard()
    for nth, (worker, exchange) in enumerate((("a", 0.5), ("b", 0.2), ("c", 0.0))):
        world.push(
            nth, 0, 1, vector=torch.zeros(world.layout.floats), worker=worker,
            update=f"{worker}.1", base=0, batch=1.0, step_seconds=nth * 0.01,
            exchange_seconds=exchange,
        )  # fmt: skip

    turn_until(shard, 3)

    # Zeros are workers that have not measured it yet.
    assert world.snapshots.read().meta.round == RoundFacts(
        workers=3,
        batch=3.0,
        step_seconds=pytest.approx(4 / 300),
        exchange_seconds=0.2,
        samples=3,
    )


def test_an_open_round_is_published_if_the_tensors_server_comes_back_empty(world: World) -> None:
    shard = first_round(world)
    push(world, "a", 0, 1, 2, 4.0)
    shard.turn()
    world.tensors.flushall()

    shard.turn()

    assert world.snapshots.version() == 3
    assert world.vector()[0] == 4.0 / 2, "the worker b, which is missing, has half of the batch"
    assert world.positions() == {0: 2, 1: 1}


def test_a_second_update_of_a_worker_waits_for_the_next_round(world: World) -> None:
    shard = first_round(world)
    first = push(world, "a", 0, 1, 2, 4.0)
    second = push(world, "a", 0, 2, 3, 6.0)
    shard.turn()
    assert (world.fate(first), world.fate(second)) == ("pending", "pending")
    assert shard.position[1] != "0-0", "nothing new has to be read"
    other = push(world, "b", 1, 1, 2, 8.0)

    shard.turn()

    fates = [world.fate(each) for each in (first, other, second)]
    assert fates == ["applied", "applied", "pending"]
    assert world.vector()[0] == 6.0
    push(world, "b", 1, 2, 3, 2.0)
    shard.turn()
    assert world.fate(second) == "applied"
    assert world.vector()[0] == 6.0 + 4.0
    assert world.positions() == {0: 3, 1: 3}


def test_a_second_update_ends_no_round(world: World) -> None:
    """A worker that pushes more often than others doesn't make them late."""
    shard = first_round(world)
    for start in (1, 2, 3):
        push(world, "a", 0, start, start + 1, 4.0)
        shard.turn()

    assert shard.version == 2
    shard.lose({"b"})
    for version in (3, 4, 5):
        shard.turn()
        assert shard.version == version, "each is a round of its own"
    assert world.vector()[0] == 3 * 4.0


def test_a_late_update_counts_in_the_next_round(world: World) -> None:
    shard = first_round(world)
    push(world, "a", 0, 1, 2, 4.0, seconds=0.0)
    late = push(world, "b", 1, 1, 2, 8.0)
    world.tensors.delete(world.keys.stream)  # as if b had not pushed yet
    push(world, "a", 2, 0, 1, 4.0, seconds=0.0)
    turn_until(shard, 3)
    assert world.vector()[0] == 4.0 / 2, "without b, it has half of the batch"
    assert world.snapshots.read().meta.round.workers == 2
    header, payload = world.update(
        1, 1, 2, 1, vector=torch.full((world.layout.floats,), 8.0), worker="b", update="b.late",
        base=late.base, batch=1.0, step_seconds=LONG,
    )  # fmt: skip
    world.inject(header, payload)
    push(world, "a", 2, 1, 2, 2.0)

    shard.turn()

    assert world.vector()[0] == 2.0 + (8.0 + 2.0) / 2
    assert world.snapshots.read().meta.totals.staleness == {"0": 4, "1": 1}


def test_the_last_update_of_a_job_waits_for_nobody(make_world: MakeWorld) -> None:
    world = make_world(update=ROUNDS, subtasks_per_epoch=2, epochs=1, samples=4)
    shard = first_round(world)
    push(world, "a", 0, 1, 2, 0.0)
    push(world, "c", 1, 1, 2, 0.0)

    shard.turn()

    assert world.complete
