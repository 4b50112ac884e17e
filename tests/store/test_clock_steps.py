"""Servers whose clock is set back: what has expired must not come back to life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.clocks import SteppingServer
from support.servers import url_of
from support.waiting import PATIENCE, await_truth
from support.world import World, lease_of

from vcasgd.schemas.joining import JoinRequest
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.tensors import updates as module
from vcasgd.store.tensors.updates import PushSlots

#: Seconds of a lease.
LEASE = 1.0
HOUR = 3600


@pytest.fixture(scope="module")
def stepping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppingServer]:
    server = SteppingServer(tmp_path_factory.mktemp("server"), durable=False)
    yield server
    server.end()


@pytest.fixture
def clock(stepping: SteppingServer) -> SteppingServer:
    stepping.set_clock(0)
    return stepping


@pytest.fixture
def clients(clock: SteppingServer) -> Iterator[tuple[RedisClient, RedisClient]]:
    pair = connect(url_of(clock, 0)), connect(url_of(clock, 1))
    yield pair
    for client in pair:
        client.close()


def seconds_of(client: RedisClient) -> int:
    return int(client.time()[0])


def test_a_dead_workers_lease_ends_and_a_live_ones_does_not(
    clock: SteppingServer, world: World
) -> None:
    # Given a worker that died with a lease, and one with all others
    dead, alive = world.leases("dead", LEASE), world.leases("alive", LEASE)
    # For longer than this machine may take until the dead one has its own.
    slow = world.leases("alive")
    held = []
    while isinstance(lease := slow.acquire(), Lease):
        held.append(lease)
    slow.release(held.pop())
    assert held
    lost = lease_of(dead.acquire())
    before = seconds_of(world.ledger)

    clock.set_clock(-HOUR)
    assert seconds_of(world.ledger) < before

    # Then the dead worker's lease ends as soon as without it
    def taken() -> Lease | None:
        assert not alive.renew({}, held).lost
        answer = alive.acquire()
        return answer if isinstance(answer, Lease) else None

    assert await_truth(taken).piece == lost.piece


def test_a_dead_controller_is_followed_by_another_one(
    clock: SteppingServer, ledger: RedisClient
) -> None:
    control = Control(ledger)
    assert not control.held()
    assert control.hold("dead", HOUR).token == 1
    assert control.held()

    clock.set_clock(-HOUR)

    assert not control.held()
    assert control.hold("alive", LEASE).token == 0, "it may be alive"
    assert await_truth(lambda: control.hold("alive", LEASE).token) == 2
    assert control.hold("alive", HOUR).token == 2, "renewed"
    assert control.held()
    assert control.hold("dead", HOUR).token == 0


def test_a_silent_workers_push_slot_is_released(
    clock: SteppingServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOT_SECONDS", LEASE)
    slots = PushSlots(world.tensors, world.keys)
    world.push(0, 0, 3)
    assert slots.take("silent.1")

    clock.set_clock(-HOUR)

    assert await_truth(lambda: slots.reap(1)) == 1
    assert world.tensors.zscore(world.keys.push_slots, "silent.1") is None
    assert world.tensors.zcard(world.keys.push_slots) == 1, "an update in the stream keeps its slot"


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_machines_that_joined_are_lost_by_their_silence_alone(
    clock: SteppingServer, ledger: RedisClient, step: int
) -> None:
    # Given a machine that reports, and one that died, as a patient and a hasty controller see them
    patient, hasty = JoinedMachines(ledger, PATIENCE), JoinedMachines(ledger, LEASE / 10)
    request = JoinRequest(version="1", host="h", cpus=1, memory_mb=1)
    alive, dead = (patient.join("ann", "0" * 64, "s", None, "p", request).name for _ in range(2))

    def present(machines: JoinedMachines) -> set[str]:
        return {machine.name for machine, _, _ in machines.present()}

    def reported() -> set[str]:
        hasty.report(alive, {}, leaving=False)
        return present(hasty)

    assert present(patient) == {alive, dead}
    reported()

    # When the clock is set
    clock.set_clock(step)

    # Then both are there at first, and the one that is silent is lost later
    assert present(patient) == {alive, dead}
    await_truth(lambda: reported() == {alive})
