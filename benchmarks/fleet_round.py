"""Measure rounds of the fleet loop alone: processor seconds, and what they cost the ledger.

    python benchmarks/fleet_round.py [--machines 10000] [--jobs 20] [--rounds 6]

Runs the fleet loop on a simulated cloud and a real ledger. Before each round, half of the workers
send a heartbeat. At the end, up to 1,000 machines disappear. Prints one JSON object for each phase,
with medians. To compare versions on a busy machine, run both at the same time, each from its own
checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from io import StringIO
from pathlib import Path

import psutil

from benchmarks.measure.control.cloud import POOL, SimulatedCloud, SimulatedPools, as_cluster
from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.settings import load_settings, separate_settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import ForegroundStack, StackHome
from vcasgd.store.connection import connect
from vcasgd.store.embedded import ServerFiles
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.worker_names import job_of

#: Rounds in which all workers start.
START_ROUNDS = 4
BEAT = {
    "host": "ip-10-0-0-1", "pid": 1, "doing": "training", "step_seconds": 0.1, "local_steps": 1,
    "pushed_again": 0, "discarded": 0, "unapplied": 1, "resident_bytes": 1 << 30,
    "memory_bytes": 1 << 34, "memory_free_bytes": 1 << 33, "cores": 8,
}  # fmt: skip


class Rig:
    def __init__(
        self, home: StackHome, ledger_pid: int, url: str, machines: int, jobs: int
    ) -> None:
        self.heartbeat = max(1.0, machines / 1000)
        os.environ |= {
            "VCASGD_HOME": str(home.path), "VCASGD_LEDGER_URL": url, "VCASGD_TENSORS_URL": url,
            "VCASGD_STORAGE_URL": f"file://{home.storage}", "VCASGD_RAY_ADDRESS": "127.0.0.1:1",
            "VCASGD_JOB_SECRET": home.ensure_password("jobs"),
            "VCASGD_HEARTBEAT": str(self.heartbeat),
        }  # fmt: skip
        self.ledger, self.process = connect(url, over_limit=True), psutil.Process(ledger_pid)
        for at in range(jobs):
            Jobs(self.ledger).submit(spec(len(range(at, machines, jobs))), package="none")
        self.cloud = SimulatedCloud(machines, [StringIO()])
        self.fleet = FleetLoop(Fleet(
            load_settings(), self.ledger, SimulatedPools(self.cloud, machines),
            WorkerBeats(self.ledger), lambda: as_cluster(self.cloud), lambda: True,
        ))  # fmt: skip

    def beat(self, number: int) -> None:
        count = {"steps": number, "samples": number, "version": number, "pushes": number,
                 "pushed_bytes": number, "fetched_bytes": number}  # fmt: skip
        for worker in sorted(self.cloud.workers())[number % 2 :: 2]:
            leases = Leases(self.ledger, job_of(worker), worker, 8 * self.heartbeat, "")
            leases.renew({**BEAT, **count, "at": time.time()}, [])

    def round(self) -> dict[str, float]:
        before, began = self._stats(), time.monotonic()
        cpu = time.thread_time()
        self.fleet.round()
        cpu, seconds = time.thread_time() - cpu, time.monotonic() - began
        after = self._stats()
        changed = {name: round(after[name] - value, 3) for name, value in before.items()}
        return {"cpu_seconds": round(cpu, 3), "seconds": round(seconds, 3), **changed}

    def _stats(self) -> dict[str, float]:
        stats, times = self.ledger.info("stats"), self.process.cpu_times()
        return {
            "ledger_cpu_seconds": times.user + times.system,
            "ledger_commands": stats["total_commands_processed"],
            "ledger_megabytes": stats["total_net_input_bytes"] / 1e6,
        }


def spec(workers: int) -> JobSpec:
    return JobSpec.parse({
        "name": "bench", "task": "bench:Task", "epochs": 1, "subtasks_per_epoch": 1000,
        "workers": {"min": 0, "max": workers, "pools": [POOL]},
    })  # fmt: skip


def show(phase: str, rounds: list[dict[str, float]]) -> None:
    medians = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
    print(json.dumps({"phase": phase, "rounds": len(rounds), **medians}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vcasgd-bench-") as folder:
        home = Path(folder) / "home"
        stack = ForegroundStack(separate_settings(home=home), ("ledger",))
        try:
            state = stack.await_ready()
            files = StackHome(home)
            password, port = files.ensure_password("ledger"), state.ports["ledger"]
            url = ServerFiles(home / "ledger", port, password).url
            pid = state.parts["ledger"].pid
            assert pid is not None
            rig = Rig(files, pid, url, options.machines, options.jobs)
            for _ in range(START_ROUNDS):
                rig.round()
            rounds = []
            for number in range(options.rounds):
                rig.beat(number + 1)
                rounds.append(rig.round())
            show("heartbeats", rounds)
            rig.cloud.lose(min(1000, options.machines // 2))
            for phase in ("machines are lost", "replacements start"):
                show(phase, [rig.round()])
        finally:
            stack.stop()


if __name__ == "__main__":
    main()
