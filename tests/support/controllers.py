"""Fleet loops over a simulated cloud, under a clock that the test sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from benchmarks.measure.control.cloud import SimulatedCloud, SimulatedPools, as_cluster
from support.waiting import await_truth
from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.schemas.fleet import Machine
from vcasgd.settings import Settings
from vcasgd.steady_time import steady_time
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.workers import WorkerBeats


class Cloud(SimulatedCloud):
    """Simulated machines, which a test changes one by one."""

    def __init__(self, most: int = 4) -> None:
        super().__init__(most, [StringIO()])
        self.most = most
        #: Machines that do not join, and that are not listed, if they are launched now.
        self.boots, self.lists = True, True
        #: False if machines ignore requests to end; the number of these requests; the boot error.
        self.ends, self.asked = True, 0
        self.problem: str | None = None
        self.crashed: set[str] = set()
        self._booting: set[str] = set()

    def launch(self, *arguments: Any, **options: Any) -> list[str]:
        names = super().launch(*arguments, **options)
        if not self.boots:
            self._booting |= set(names)
        if not self.lists:
            for name in names:
                self.take(name)
        return names

    def terminate(self, *machine_ids: str) -> None:
        self.asked += 1
        if self.ends:
            super().terminate(*machine_ids)

    def boot_error(self, machine_id: str) -> str | None:
        return self.problem

    def join(self) -> None:
        """Let all machines join that boot."""
        self.boots = True
        self._booting.clear()

    def nodes(self) -> frozenset[str]:
        return super().nodes() - self._booting

    def change(self, machine: str, **fields: Any) -> None:
        """Change what the provider tells of a machine."""
        self._machines[machine] = self._machines[machine].model_copy(update=fields)

    def take(self, machine: str) -> None:
        """Take a machine of which the provider tells; its worker stays listed."""
        del self._machines[machine]

    def crash(self, worker: str) -> None:
        """End a worker's process, which its machine reports."""
        self.crashed.add(worker)

    def report(self, machine: str) -> str:
        rows = {row["worker"]: row for row in json.loads(self._orders[machine])}
        ends = {name: "it was killed" if name in self.crashed else None for name in rows}
        workers = {n: {"start": row["start"], "ended": ends[n]} for n, row in rows.items()}
        return json.dumps({"at": 0.0, "workers": workers})


def fleet_loop(
    settings: Settings,
    ledger: RedisClient,
    pools: PoolRegistry,
    cluster: SimulatedCloud | None = None,
    clock: Callable[[], float] = steady_time,
    leads: Callable[[], bool] = lambda: True,
) -> FleetLoop:
    """Return the loop of a controller. A simulated cluster stands for that of Ray."""
    fleet = Fleet(
        settings,
        ledger,
        pools,
        WorkerBeats(ledger),
        lambda: as_cluster(cluster) if cluster else None,
        leads,
        clock,
    )
    return FleetLoop(fleet)


class Controllers:
    """Controllers of one ledger, one after the other, and under one clock."""

    def __init__(self, home: Path, ledger: RedisClient) -> None:
        self.ledger = ledger
        #: Seconds by which the clock is ahead.
        self.ahead = 0.0
        #: Says of the present controller whether it leads.
        self.leads: Callable[[], bool] = lambda: True
        self.settings = Settings(
            home=home,
            heartbeat=60.0,
            hold_seconds=0.0,
            ray_address="127.0.0.1:1",
            storage_url=f"file://{home}",
            # Nothing connects to them.
            ledger_url=SecretStr("redis://ledger"),
            tensors_url=SecretStr("redis://tensors"),
        )

    def start(self, cloud: Cloud) -> FleetLoop:
        pools = SimulatedPools(cloud, cloud.most)
        return fleet_loop(self.settings, self.ledger, pools, cloud, self._clock, self._leads)

    def _clock(self) -> float:
        return steady_time() + self.ahead

    def _leads(self) -> bool:
        return self.leads()

    def run(self, loop: FleetLoop, until: Callable[[], object]) -> None:
        """Run rounds until a condition holds, and one more, which observes it."""
        await_truth(lambda: (loop.round(), until())[1])
        loop.round()

    def run_with(self, cloud: Cloud, machines: int) -> tuple[FleetLoop, list[Machine]]:
        """Start a controller, and return it with so many machines, once they run workers."""
        loop = self.start(cloud)
        self.run(loop, lambda: len(cloud.workers()) == machines)
        return loop, cloud.machines()
