"""A lost machine starts a round of the fleet loop, which frees the leases of its worker.

Machines that can't report are not lost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.controllers import Cloud, Controllers
from support.waiting import await_truth
from support.world import World

from vcasgd.controller.fleet.loop import LOOK_SECONDS, FleetLoop
from vcasgd.schemas.joining import JoinRequest
from vcasgd.store import keys
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger import machines as machines_module
from vcasgd.store.ledger.leases import Lease, LostWorkers
from vcasgd.store.ledger.machines import FORGET_SECONDS, JoinedMachines, MachineReport
from vcasgd.worker_names import worker_name

HOUR = 3600.0

MakeLoop = Callable[[World], FleetLoop]


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def make_loop(cloud: Cloud, tmp_path: Path) -> MakeLoop:
    return lambda world: Controllers(tmp_path, world.ledger).start(cloud)


@pytest.mark.parametrize("how", ["the machine is gone", "the worker is dead", "both"])
def test_leases_are_free_after_one_round(
    how: str, make_world: Callable[..., World], make_loop: MakeLoop, cloud: Cloud
) -> None:
    # Given a job with two workers, whose leases last for an hour
    world = make_world(workers={"min": 2, "max": 2})
    fleet = make_loop(world)
    await_truth(lambda: (fleet.round(), len(cloud.workers()) == 2)[1])
    fleet.round()
    first, second = sorted(cloud.workers())
    lease = world.leases(first, HOUR).acquire()
    assert isinstance(lease, Lease)
    machine = first.partition(".")[2]
    assert first == worker_name(machine, world.job)

    # When one of them is lost
    if how != "the worker is dead":
        cloud.take(machine)
    if how != "the machine is gone":
        cloud.crash(first)
    fleet.round()

    # Then the other one can continue its work at once, and rounds don't wait for it
    again = world.leases(second, HOUR).acquire()
    assert isinstance(again, Lease)
    assert (again.piece, again.token > lease.token) == (lease.piece, True)
    assert first in LostWorkers(world.ledger).news([world.job])[world.job]
    # A controller that starts later reports it again, which changes nothing
    make_loop(world).round()
    assert world.jobs.leases(world.job)[lease.piece] == second


def test_loss_starts_the_next_round_early(
    make_world: Callable[..., World], make_loop: MakeLoop, cloud: Cloud
) -> None:
    # Given two machines that work, and half a minute until the next round
    world = make_world(workers={"min": 2, "max": 2})
    fleet = make_loop(world)
    assert fleet.due()
    await_truth(lambda: (fleet.round(), len(cloud.workers()) == 2)[1])
    fleet.round()
    assert not fleet.due()
    assert 0 < fleet.pause <= LOOK_SECONDS

    # When one of them disappears
    lost = cloud.machines()[0].id
    cloud.take(lost)

    # Then a round is due at once, which replaces it, and no further one is
    assert fleet.due()
    fleet.round()
    await_truth(lambda: cloud.counts()["machines"] == 2)
    await_truth(lambda: (fleet.round(), not fleet.due())[1])


class Joined:
    """Machines, a gateway that gives signs, and a controller with a clock of its own."""

    def __init__(self, ledger: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e6
        monkeypatch.setattr(machines_module, "boot_time", lambda: self.now)
        self.machines = JoinedMachines(ledger, 8.0)
        request = JoinRequest(version="1", host="h", cpus=1, memory_mb=1)
        self.names = [
            self.machines.join("ann", "0" * 64, "s", None, "p", request).name for _ in range(2)
        ]

    def present(self) -> list[str]:
        found = {machine.name for machine, _, _ in self.machines.present()}
        return [name for name in self.names if name in found]

    def pass_time(self, seconds: int, *reporting: str, sign: bool = True) -> None:
        for _ in range(seconds):
            self.now += 1.0
            if sign:
                self.machines.reports_arrive()
            for name in reporting:
                self.machines.report(name, {}, leaving=False)
            self.present()


@pytest.fixture
def joined(ledger: RedisClient, monkeypatch: pytest.MonkeyPatch) -> Joined:
    return Joined(ledger, monkeypatch)


def test_machines_that_can_not_report_are_not_lost(joined: Joined) -> None:
    # Given two machines, a gateway, and an API that stops to answer while one machine dies
    alive, dead = joined.names
    joined.pass_time(10, alive, dead)
    joined.pass_time(200, sign=False)

    # Then both count, also at first when the API answers again
    assert joined.present() == [alive, dead]
    joined.pass_time(15)
    assert joined.present() == [alive, dead]

    # And the dead one is lost once it could have reported
    joined.pass_time(10, alive)
    assert joined.present() == [alive]


def test_machines_are_lost_if_they_can_not_report_for_long(joined: Joined) -> None:
    joined.pass_time(2, *joined.names)
    joined.pass_time(int(FORGET_SECONDS), sign=False)
    assert joined.present() == joined.names
    joined.pass_time(30, sign=False)
    assert joined.present() == []


def test_a_controller_that_starts_while_machines_can_not_report(
    joined: Joined, ledger: RedisClient
) -> None:
    # Given machines that reported until a gateway stopped an hour ago
    past = ledger.now() - HOUR
    for name in joined.names:
        ledger.hset(keys.JOINED_REPORTS, name, MachineReport(at=past).model_dump_json())
    ledger.set(keys.REPORTS_ARRIVE, past + 1)

    # Then a controller that starts now counts them, too
    assert joined.present() == joined.names
