"""Process: the product's controller on a simulated cloud.

It reads ``{"lose": 100}`` from its standard input, and appends one line for each round of the fleet
loop to ``--rounds``: when it ended, its seconds, its processor seconds,
and the counts of the cloud after it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from benchmarks.measure.control.cloud import SimulatedCloud, SimulatedPools, as_cluster
from vcasgd.cluster.driver import Cluster
from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.main import Controller
from vcasgd.errors import VcasgdError
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import load_settings


class SimulatedController(Controller):
    """Controller whose machines and cluster are simulated."""

    def __init__(self, cloud: SimulatedCloud, machines: int, rounds: TextIO) -> None:
        super().__init__(load_settings())
        self._cloud = cloud
        self._machines = machines
        self._rounds = rounds

    def make_pools(self) -> PoolRegistry:
        return SimulatedPools(self._cloud, self._machines)

    def connect_cluster(self, pools: PoolRegistry) -> Cluster | None:  # noqa: ARG002 - simulated
        return as_cluster(self._cloud)

    def fleet_round(self, loop: FleetLoop) -> None:
        started, cpu = time.monotonic(), time.thread_time()
        loop.round()
        now = time.monotonic()
        times = {"seconds": now - started, "cpu_seconds": time.thread_time() - cpu}
        row = {"at": now, **times, **self._cloud.counts()}
        self._rounds.write(json.dumps(row) + "\n")
        self._rounds.flush()


def _serve_orders(cloud: SimulatedCloud) -> None:
    for line in sys.stdin:
        cloud.lose(json.loads(line)["lose"])


def main() -> int:
    """Run the controller until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--workers", nargs="+", required=True, help="pipes to workers' processes")
    parser.add_argument("--rounds", required=True)
    options = parser.parse_args()
    configure_logging("controller")
    pipes = [Path(path).open("w") for path in options.workers]  # noqa: SIM115 - until the process ends
    cloud = SimulatedCloud(options.machines, pipes)
    threading.Thread(target=_serve_orders, args=(cloud,), daemon=True).start()
    try:
        with Path(options.rounds).open("a") as rounds:
            controller = SimulatedController(cloud, options.machines, rounds)
            signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
            controller.run()
    except VcasgdError as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
