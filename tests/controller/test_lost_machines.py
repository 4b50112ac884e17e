"""A lost machine starts a round of the fleet loop, which frees the leases of its worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.controllers import Cloud, Controllers
from support.waiting import await_truth
from support.world import World

from vcasgd.controller.fleet.loop import LOOK_SECONDS, FleetLoop
from vcasgd.store.ledger.leases import Lease, LostWorkers
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
