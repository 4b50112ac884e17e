"""Epochs of many subtasks: what is reported in several parts, and a million of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from support.harness import RedisServer
from support.servers import Fault, Moment, through_proxy
from support.world import World, blocks_of, lease_of

from vcasgd.errors import StoreUnavailable
from vcasgd.learning.applied_record import BLOCK, SubtaskSet
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger import servers as servers_module
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.subtasks import read_subtasks
from vcasgd.store.tensors.snapshot import Record

MILLION = 1_000_000
#: A command that fails after its execution is the harder case.
MOMENTS = pytest.mark.parametrize(
    "moment", ["after", pytest.param("before", marks=pytest.mark.extended)]
)
#: Updates of which the one that takes the least memory counts, and how many times that it may be.
UPDATES, MAX_TIMES = 15, 1.4
#: Subtasks of an epoch in three blocks, the last of which the next epoch shares.
WIDTH = 2 * BLOCK + 100
#: Missing in the record of :func:`nearly_done`, in different blocks.
MISSING = (5, BLOCK, 2 * BLOCK - 1, WIDTH - 1)


def blocks_without(missing: Sequence[int], stop: int) -> dict[int, bytes]:
    """Return the blocks of all subtasks before ``stop`` but some."""
    blocks = dict.fromkeys(range(stop // BLOCK), b"\xff" * (BLOCK // 8))
    blocks |= blocks_of(*range(stop // BLOCK * BLOCK, stop))
    for subtask in missing:
        bits = bytearray(blocks[subtask // BLOCK])
        bits[subtask % BLOCK // 8] &= ~(1 << subtask % 8)
        blocks[subtask // BLOCK] = bytes(bits)
    return SubtaskSet(blocks).blocks


MakeWorld = Callable[[int, Sequence[int]], World]


@pytest.fixture
def nearly_done(ledger: RedisClient, tensors: RedisClient, tmp_path: Path) -> MakeWorld:
    """Return a function that starts a job whose first model has most of the first epoch."""

    def make(width: int, missing: Sequence[int]) -> World:
        world = World(
            ledger, tensors, tmp_path, samples=width, running=False, subtasks_per_epoch=width
        )
        lease = lease_of(world.leases("first").acquire())
        record = Record(0, {}, blocks_without(missing, width))
        assert world.snapshots.install(
            0, world.first_meta(), record, torch.zeros(world.layout.floats)
        )
        assert world.leases("first").report_facts(lease, world.facts().to_dict())
        world.jobs.set_plan(world.job, world.facts().points(world.spec))
        world.jobs.transition(world.job, JobState.RUNNING, [JobState.STARTING], why="")
        return world

    return make


@pytest.fixture
def proxied_ledger(server: RedisServer) -> Iterator[Callable[[Fault], RedisClient]]:
    with ExitStack() as stack:
        yield lambda fault: stack.enter_context(through_proxy(server, 0, fault))


def train(world: World, number: int) -> list[int]:
    """Lease and push subtasks as workers do, and return them."""
    pushed = []
    while len(pushed) < number:
        lease = lease_of(world.leases("w").acquire())
        if lease.kind == "evaluate":
            continue
        size, epoch = world.plan.size(lease.number), world.plan.epoch_of(lease.number)
        assert world.sender.begin(lease.number, epoch, size, lease.token) == 0
        assert world.push(lease.number, 0, size, lease.token)[1].accepted
        pushed.append(lease.number)
    return pushed


@pytest.mark.parametrize("width", [WIDTH, MILLION])
def test_an_epoch_of_many_subtasks_ends(nearly_done: MakeWorld, width: int) -> None:
    missing = [5, BLOCK, width // 2, width - 1]
    world = nearly_done(width, missing)
    shard = world.started_shard()

    # Only what the record lacks is leased, and then the next epoch
    assert train(world, 4) == missing
    view = read_subtasks(world.ledger, world.job, width, 0, width).counts()
    assert (view["a"], view["l"]) == (width - 4, 4)
    while world.jobs.get(world.job).finished_epochs < 1:
        shard.turn()
    assert train(world, 2) == [width, width + 1]
    shard.turn()

    record = world.snapshots.read().record
    assert (record.finished, list(record.applied(world.plan).done)) == (1, [width, width + 1])
    assert world.done_in_ledger() == [width, width + 1]
    assert world.counts().count(1.0) == 4 + 2 - len({0, 1} & set(missing))
    # What is kept doesn't grow with the number of subtasks
    assert world.tensors.hlen(world.keys.pushed) == world.tensors.hlen(world.keys.tokens) == 0
    assert world.tensors.hlen(world.keys.applied) <= 5
    assert world.ledger.hlen(world.ledger_keys.blocks) == 1

    # A checkpoint has all of it
    world.checkpoint()
    world.lose_tensors()
    world.shard().turn()
    assert world.snapshots.read().record == record


def test_an_update_costs_the_same_in_an_epoch_of_many_subtasks(nearly_done: MakeWorld) -> None:
    """Copies of the applied record took most of the time, and show in the memory of a turn."""

    def allocated(width: int) -> int:
        world = nearly_done(width, range(0, width, 2))
        shard, peaks = world.shard(), []
        shard.turn()
        for _ in range(UPDATES):
            train(world, 1)
            tracemalloc.start()
            shard.turn()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return min(peaks)

    assert allocated(100_000) < MAX_TIMES * allocated(1000)


@MOMENTS
def test_a_server_that_dies_between_the_parts_of_its_record(
    nearly_done: MakeWorld,
    proxied_ledger: Callable[[Fault], RedisClient],
    monkeypatch: pytest.MonkeyPatch,
    moment: Moment,
) -> None:
    """A successor stores the whole record, and work is leased exactly where it lacks something."""
    monkeypatch.setattr(servers_module, "MAX_BLOCKS_STORED", 1)
    fired = 0
    for at in range(1, 100):
        fault = Fault(at, moment)
        world = nearly_done(WIDTH, MISSING)
        broken = world.shard(ledger=proxied_ledger(fault))
        fault.arm()
        with suppress(StoreUnavailable):
            broken.turn()
        fault.disarm()
        if not fault.fired:
            break
        fired += 1
        world.shard().turn()
        assert train(world, 5) == [*MISSING, WIDTH]
    assert fired >= 4, "fewer faults than parts"


@MOMENTS
def test_a_report_that_is_interrupted_between_its_parts(
    nearly_done: MakeWorld,
    proxied_ledger: Callable[[Fault], RedisClient],
    monkeypatch: pytest.MonkeyPatch,
    moment: Moment,
) -> None:
    """It is repeated as a whole, by the same server or by its successor."""
    monkeypatch.setattr(servers_module, "MAX_REPORTED", 1)
    for successor in (False, True):
        fired = 0
        for at in range(1, 100):
            fault = Fault(at, moment)
            world = nearly_done(WIDTH, MISSING)
            shard = world.started_shard(ledger=proxied_ledger(fault))
            train(world, 4)
            fault.arm()
            try:
                shard.turn()
            except StoreUnavailable:
                fired += 1
            fault.disarm()
            if not fault.fired:
                break
            (world.shard() if successor else shard).turn()
            assert world.jobs.get(world.job).finished_epochs == 1
            assert world.partition().leased == world.partition().open == {}
            assert train(world, 1) == [WIDTH]
        assert fired >= 4, "fewer faults than parts"
