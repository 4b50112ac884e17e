"""Simulated cloud and cluster: machines that exist at once, and workers in other processes."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO, cast

from vcasgd.cluster.driver import Cluster
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.base import Boot, Provider
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState

#: Name of the only pool.
POOL = "simulated"


class SimulatedCloud(Provider[LocalPoolSpec]):
    """Provider of machines, and the machines in the cluster. Threads may share it.

    Each worker is started and killed by a line of JSON to the processes that simulate workers.
    """

    name = "local"
    max_terminated = 1000

    def __init__(self, machines: int, processes: Sequence[TextIO]) -> None:
        super().__init__("simulated", ())
        self._most = machines
        self._processes = processes
        self._lock = threading.Lock()
        self._launches: dict[str, list[str]] = {}
        self._machines: dict[str, Machine] = {}
        #: Names of the workers on each machine, and the orders that it has.
        self._on_machine: defaultdict[str, set[str]] = defaultdict(set)
        self._orders: dict[str, str] = {}
        self._started = 0
        self._ordered_at = 0.0

    def lose(self, count: int) -> None:
        """Take machines without notice, with their workers."""
        with self._lock:
            for name in list(self._machines)[:count]:
                self._end(name)

    def workers(self) -> set[str]:
        """Return the names of the workers that run."""
        with self._lock:
            return set().union(*self._on_machine.values())

    def counts(self) -> dict[str, float]:
        """Return the number of present machines, of all launched ones, and of started workers, and
        when the last launch was requested, by :func:`time.monotonic`.
        """
        with self._lock:
            launched = sum(map(len, self._launches.values()))
            return {
                "machines": len(self._machines), "launched": launched, "placed": self._started,
                "ordered_at": self._ordered_at,
            }  # fmt: skip

    # -- provider ------------------------------------------------------------------------------

    def offers(self, pool: str) -> list[Offer]:
        priced: dict[str, Any] = {"pool": pool, "spot": True, "cpus": 4.0, "gpus": 0,
                                  "as_of": time.time(), "source": "simulated"}  # fmt: skip
        return [
            Offer(
                **priced,
                zone=zone,
                machine_type=kind,
                price_per_hour=price,
                on_demand_price_per_hour=3 * price,
            )
            for zone in ("a", "b", "c")
            for kind, price in (("small", 0.1), ("large", 0.11))
        ]

    def launch(
        self,
        pool: str,
        count: int,
        boot: Boot,  # noqa: ARG002 - nothing boots
        token: str,
        *,
        zones: Sequence[str] | None = None,
        machine_types: Sequence[str] | None = None,
        spot: bool | None = None,
    ) -> list[str]:
        with self._lock:
            if token not in self._launches:
                self._ordered_at = time.monotonic()
                first = sum(map(len, self._launches.values()))
                names = [f"i-{first + at:08d}" for at in range(count)]
                self._launches[token] = names
                kind, zone = (machine_types or ["small"])[0], (zones or ["a"])[0]
                for name in names:
                    self._machines[name] = Machine(
                        id=name, pool=pool, state=MachineState.RUNNING, launched_at=time.time(),
                        notice_at=None, host="10.0.0.1", price_per_hour=0.1,
                        spot=spot is not False, zone=zone, machine_type=kind,
                        on_demand_price_per_hour=0.3,
                    )  # fmt: skip
            return self._launches[token]

    def capacity(self, pool: str) -> int:  # noqa: ARG002 - there is one pool
        return self._most

    def machines(self) -> list[Machine]:
        with self._lock:
            return list(self._machines.values())

    def terminate(self, *machine_ids: str) -> None:
        with self._lock:
            for machine_id in machine_ids:
                self._end(machine_id)

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:  # noqa: ARG002
        self.terminate(machine_id)

    # -- cluster -------------------------------------------------------------------------------

    def nodes(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._machines)

    def exchange(self, orders: Mapping[str, str]) -> dict[str, str | None]:
        for machine, text in orders.items():
            self.send(machine, text)
        with self._lock:
            return {name: self.report(name) for name in orders if name in self._machines}

    def send(self, machine: str, orders: str) -> None:
        with self._lock:
            if machine not in self._machines or self._orders.get(machine) == orders:
                return
            self._orders[machine] = orders
            wanted = {row["worker"]: row for row in json.loads(orders)}
            running = self._on_machine[machine]
            for name in running - wanted.keys():
                self._tell(name, {"kill": name})
            for name in wanted.keys() - running:
                self._started += 1
                row = wanted[name]
                arguments = {"job": row["job"], "worker": name, "machine": machine}
                self._tell(name, {"start": name, "arguments": arguments, "env": row["env"]})
            self._on_machine[machine] = set(wanted)

    def report(self, machine: str) -> str:  # noqa: ARG002 - all are the same
        """Return the report of a machine, whose workers all run."""
        return '{"at": 0}'

    def _end(self, machine: str) -> None:
        self._machines.pop(machine, None)
        self._orders.pop(machine, None)
        for name in self._on_machine.pop(machine, ()):
            self._tell(name, {"kill": name})

    def _tell(self, worker: str, order: dict[str, Any]) -> None:
        # The number at the end of a machine's name spreads its workers evenly.
        process = self._processes[int(worker[-4:]) % len(self._processes)]
        process.write(json.dumps(order) + "\n")
        process.flush()


class SimulatedPools(PoolRegistry):
    """The one pool of a simulated cloud."""

    def __init__(self, cloud: SimulatedCloud, machines: int) -> None:
        self.specs = {POOL: LocalPoolSpec(name=POOL, provider="local", max_machines=machines)}
        self.providers = {POOL: cloud}
        self.problems, self.replaced, self._stored = {}, [], {}

    def refresh(self) -> bool:
        """Return False: the pool never changes."""
        return False

    def remember(self, pools: Iterable[str]) -> None:
        """Do nothing: the cloud ends with the benchmark."""


def as_cluster(cloud: SimulatedCloud) -> Cluster:
    """Return the cloud as the cluster, of which it has all methods that the controller calls."""
    return cast("Cluster", cloud)
