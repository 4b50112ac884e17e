"""A lost machine starts a round of the fleet loop, which frees the leases of its worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from pydantic import SecretStr
from support.waiting import await_truth
from support.world import World

from benchmarks.measure.control.cloud import SimulatedCloud, SimulatedPools, as_cluster
from vcasgd.controller.fleet.loop import LOOK_SECONDS, FleetLoop
from vcasgd.settings import Settings
from vcasgd.store.ledger.leases import Lease, LostWorkers
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.worker_names import worker_name

HOUR = 3600.0

MakeLoop = Callable[[World], FleetLoop]


class Cloud(SimulatedCloud):
    """Simulated machines, on which single workers can crash."""

    def __init__(self) -> None:
        super().__init__(4, [StringIO()])
        self.crashed: set[str] = set()

    def workers(self) -> list[str]:
        return sorted(name for names in self._on_machine.values() for name in names)

    def crash(self, worker: str) -> None:
        """End a worker's process, which its machine reports."""
        self.crashed.add(worker)

    def report(self, machine: str) -> str:
        rows = {row["worker"]: row for row in json.loads(self._orders[machine])}
        ends = {name: "it was killed" if name in self.crashed else None for name in rows}
        workers = {n: {"start": row["start"], "ended": ends[n]} for n, row in rows.items()}
        return json.dumps({"at": 0.0, "workers": workers})

    def take(self, machine: str) -> None:
        """Take a machine of which the provider tells, and its worker stays listed."""
        del self._machines[machine]


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def make_loop(cloud: Cloud, tmp_path: Path) -> MakeLoop:
    settings = Settings(
        home=tmp_path,
        heartbeat=60.0,
        ray_address="127.0.0.1:1",
        storage_url=f"file://{tmp_path}",
        # Nothing connects to them.
        ledger_url=SecretStr("redis://ledger"),
        tensors_url=SecretStr("redis://tensors"),
    )

    def make(world: World) -> FleetLoop:
        pools, beats = SimulatedPools(cloud, 4), WorkerBeats(world.ledger)
        return FleetLoop(
            settings, world.ledger, pools, beats, lambda: as_cluster(cloud), lambda: True
        )

    return make


@pytest.mark.parametrize("how", ["the machine is gone", "the worker is dead", "both"])
def test_leases_are_free_after_one_round(
    how: str, make_world: Callable[..., World], make_loop: MakeLoop, cloud: Cloud
) -> None:
    # Given a job with two workers, whose leases last for an hour
    world = make_world(workers={"min": 2, "max": 2})
    fleet = make_loop(world)
    await_truth(lambda: (fleet.round(), len(cloud.workers()) == 2)[1])
    fleet.round()
    first, second = cloud.workers()
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
