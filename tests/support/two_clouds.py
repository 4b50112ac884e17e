"""A fleet loop over emulated EC2 and a fake Compute Engine, with a simulated cluster."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from benchmarks.measure.control.cloud import SimulatedCloud, SimulatedPools
from support.controllers import fleet_loop
from support.harness import RedisServer
from support.provider_backends import AwsBackend, GcpBackend
from support.waiting import await_truth
from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.fleet.notices import Notice
from vcasgd.settings import Settings
from vcasgd.store.ledger.control import Control


class Joined(SimulatedCloud):
    """Cluster that machines join as soon as the controller publishes them."""

    def __init__(self, control: Control, notices: dict[str, Notice]) -> None:
        super().__init__(0, [io.StringIO()])
        self._control = control
        self._notices = notices

    def nodes(self) -> frozenset[str]:
        return frozenset(self._control.machines())

    def exchange(self, orders: Mapping[str, str]) -> dict[str, str | None]:
        return {name: self.report(name) for name in orders}

    def send(self, machine: str, orders: str) -> None:
        """Do nothing: workers need not run."""

    def report(self, machine: str) -> str:
        notice = self._notices.get(machine)
        return json.dumps({"at": 0.0, "notice": notice and asdict(notice)})


class TwoClouds:
    """Both clouds, and fleet loops that are controllers one after the other."""

    def __init__(self, home: Path, server: RedisServer, aws: AwsBackend, gcp: GcpBackend) -> None:
        self._ledger = server.connection
        self._aws, self._gcp = aws, gcp
        self._settings = Settings(
            home=home,
            cluster="test",
            heartbeat=0.05,
            idle_seconds=0.0,
            ledger_url=SecretStr(server.url),
            tensors_url=SecretStr(server.url),
            storage_url=f"file://{home}",
            ray_address="127.0.0.1:1",
            pools=home / "pools.yaml",
            compute_url=gcp.url,
            price_seconds=1.0,
        )
        (home / "pools.yaml").touch()
        self.set_pools(aws.document(), gcp.document())
        self.control = Control(self._ledger)
        #: Notices that machines publish.
        self.notices: dict[str, Notice] = {}

    def controller_of(self, cloud: SimulatedCloud, machines: int) -> FleetLoop:
        """Start a controller of a simulated cloud alone."""
        return fleet_loop(self._settings, self._ledger, SimulatedPools(cloud, machines), cloud)

    def controller(self) -> FleetLoop:
        """Start a controller, which knows only the ledger, the clouds, and the pools file."""
        pools, cluster = (
            PoolRegistry(self._settings, self.control),
            Joined(self.control, self.notices),
        )
        return fleet_loop(self._settings, self._ledger, pools, cluster)

    def set_pools(self, *documents: dict[str, Any]) -> None:
        """Edit the pools file. At first, it has one pool of each cloud."""
        assert self._settings.pools is not None
        before = self._settings.pools.stat().st_mtime_ns
        self._settings.pools.write_text(json.dumps({"pools": documents}))
        # A controller sees an edit by the time and size of the file.
        os.utime(self._settings.pools, ns=(before + 1, before + 1))

    def joined(self) -> set[str]:
        """Return the machines that the controller has seen in the cluster."""
        return {name for name, row in self.control.machines().items() if row["was_up"]}

    def run(self, loop: FleetLoop, until: Any) -> None:
        """Run rounds until a condition holds."""
        await_truth(lambda: (loop.round(), until())[1])
