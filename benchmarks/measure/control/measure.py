"""Measurement of the control plane: starts all processes, asks the API, collects the figures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.measure.control.cloud import POOL
from benchmarks.measure.gauges import ProcessGauges
from vcasgd.errors import StackError
from vcasgd.settings import separate_settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import ForegroundStack, StackHome
from vcasgd.stack.child import die_with_parent
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.embedded import ServerFiles
from vcasgd.store.ledger.jobs import Jobs

#: Parts of the stack; the controller is started here, on a simulated cloud.
PARTS = ("ledger", "tensors", "server", "api")
#: Processes that are the control plane; the others exchange updates, or simulate workers.
CONTROL_PLANE = ("ledger", "controller", "api")
#: Workers of one process: it may open 20,000 files, and each worker has two connections.
WORKERS_PER_PROCESS = 5000
#: Heartbeats per second of all workers together; beyond it, the interval is longer.
MAX_BEATS_PER_SECOND = 1000.0
#: Seconds in which all workers must have access, and the same for each of them.
ADMITTED_SECONDS, ADMITTED_SECONDS_PER_WORKER = 120.0, 0.06
#: Seconds in which all machines that were lost must be replaced.
REPLACED_SECONDS = 120.0
#: Seconds between two requests of each route.
REQUEST_SECONDS = 1.0
ROUTES = ("status", "jobs", "jobs/{job}", "workers", "machines", "pools", "store", "fleet/spend")
POLL_SECONDS = 0.1

Print = Callable[[str], None]


@dataclass(frozen=True)
class ControlBenchOptions:
    """Options of a measurement. ``lost``: machines that disappear at once at its end."""

    workers: int = 100
    jobs: int = 5
    subtasks: int = 1000
    seconds: float = 30.0
    clients: int = 10
    lost: int | None = None
    push_seconds: float | None = None
    finished_jobs: int = 0

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats of a worker."""
        return max(1.0, self.workers / MAX_BEATS_PER_SECOND)

    @property
    def interval(self) -> float:
        """Seconds between two pushes of a worker; by default, 100 updates a second in all."""
        return self.push_seconds or max(1.0, self.workers / 100)

    @property
    def lost_machines(self) -> int:
        """Machines that disappear."""
        return min(1000, self.workers // 2) if self.lost is None else self.lost


def measure(options: ControlBenchOptions, log: Print) -> dict[str, Any]:
    """Start all processes, measure, and clean up. Call it in the main thread.

    Raises :class:`StackError` if a process fails, or a state isn't reached in time.
    """
    with ExitStack() as resources:
        rig = ControlRig(options, resources)
        log(f"starting {options.workers} workers, with a heartbeat every {options.heartbeat:g} s")
        admitted = rig.await_admitted()
        log(f"all admitted after {admitted:.1f} s; measuring for {options.seconds:g} s")
        figures = rig.observe()
        log(f"losing {options.lost_machines} machines")
        figures |= {"admitted_seconds": round(admitted, 1), **rig.lose()}
    return {
        **asdict(options),
        "heartbeat": options.heartbeat,
        "machine_cores": os.cpu_count(),
        **figures,
    }


class ControlRig:
    """The processes of a measurement; ``resources`` ends them."""

    def __init__(self, options: ControlBenchOptions, resources: ExitStack) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="vcasgd-bench-"))
        resources.callback(shutil.rmtree, self._folder, ignore_errors=True)
        settings = separate_settings(home=self._folder / "home", heartbeat=options.heartbeat)
        stack = ForegroundStack(settings, PARTS)
        resources.callback(stack.stop)
        self._state = stack.await_ready()
        self._home = StackHome(settings.home)
        self._ledger = connect(self._url("ledger"))
        self._started_at = time.monotonic()
        self._jobs = self._submit()
        self._workers = self._start_workers(resources)
        self._controller = self._start_controller(resources)
        self._api = resources.enter_context(
            httpx.Client(
                base_url=f"{self._state.api_url}/api/v1/",
                headers={"Authorization": f"Bearer {self._home.ensure_token()}"},
                timeout=30.0,
            )
        )

    # -- processes -----------------------------------------------------------------------------

    def _url(self, name: str) -> str:
        password = self._home.ensure_password(name)
        return ServerFiles(self._home.path / name, self._state.ports[name], password).url

    def _submit(self) -> list[str]:
        options, jobs = self._options, Jobs(self._ledger)
        _add_finished(self._ledger, options.finished_jobs)
        share = [len(range(at, options.workers, options.jobs)) for at in range(options.jobs)]
        return [jobs.submit(_spec(options, count), package="none").id for count in share if count]

    def _start_workers(self, resources: ExitStack) -> list[subprocess.Popen[bytes]]:
        count = -(-self._options.workers // WORKERS_PER_PROCESS)
        self._pipes = [self._folder / f"workers-{at}.pipe" for at in range(count)]
        self._states = [self._folder / f"workers-{at}.json" for at in range(count)]
        processes = []
        for pipe, state in zip(self._pipes, self._states, strict=True):
            os.mkfifo(pipe)
            arguments = [
                "--pipe", str(pipe), "--state", str(state),
                "--heartbeat", str(self._options.heartbeat),
                "--push-seconds", str(self._options.interval),
            ]  # fmt: skip
            processes.append(self._spawn("workers", arguments, resources))
        return processes

    def _start_controller(self, resources: ExitStack) -> subprocess.Popen[bytes]:
        self._rounds = self._folder / "rounds.jsonl"
        arguments = [
            "--machines", str(self._options.workers), "--rounds", str(self._rounds),
            "--workers", *map(str, self._pipes),
        ]  # fmt: skip
        return self._spawn("controller", arguments, resources)

    def _spawn(
        self, name: str, arguments: Sequence[str], resources: ExitStack
    ) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "VCASGD_HOME": str(self._home.path),
            "VCASGD_LEDGER_URL": self._url("ledger"),
            "VCASGD_TENSORS_URL": self._url("tensors"),
            "VCASGD_STORAGE_URL": f"file://{self._home.storage}",
            "VCASGD_JOB_SECRET": self._home.ensure_password("jobs"),
            "VCASGD_RAY_ADDRESS": "127.0.0.1:1",
            "VCASGD_HEARTBEAT": str(self._options.heartbeat),
            "VCASGD_LOG_LEVEL": "WARNING",
        }
        with self._home.open_log(name) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.measure.control.{name}", *arguments],
                env=env, stdin=subprocess.PIPE, stdout=log, stderr=log,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )  # fmt: skip
        resources.callback(_end, process)
        return process

    # -- measurement ---------------------------------------------------------------------------

    def await_admitted(self) -> float:
        """Wait until all workers have access to both servers; return the seconds."""
        seconds = ADMITTED_SECONDS + ADMITTED_SECONDS_PER_WORKER * self._options.workers
        self._await(lambda: self._count("admitted") >= self._options.workers, seconds, "admission")
        return time.monotonic() - self._started_at

    def observe(self) -> dict[str, Any]:
        """Measure for the configured time."""
        gauges, before = ProcessGauges(), self._counts()
        for name, pid in self._pids().items():
            gauges.watch(name, pid)
        requests = Requests(self._api, self._jobs)
        began, stop = time.monotonic(), threading.Event()
        threads = [threading.Thread(target=requests.repeat, args=(stop,))]
        threads += [
            threading.Thread(target=requests.follow, args=(stop,))
            for _ in range(self._options.clients)
        ]
        gauges.begin()
        for thread in threads:
            thread.start()
        while time.monotonic() - began < self._options.seconds:
            time.sleep(min(POLL_SECONDS, self._options.seconds))
            gauges.sample(time.monotonic() - began)
        gauges.end()
        stop.set()
        seconds, after = time.monotonic() - began, self._counts()
        for thread in threads:
            thread.join(REPLACED_SECONDS)
        cores = {name: each.cpu_seconds / seconds for name, each in gauges.all.items()}
        rounds = [row for row in self._all_rounds() if began <= row["at"]]
        return {
            "admitted": self._count("admitted"),
            "cores": {name: round(each, 3) for name, each in cores.items()},
            "control_plane_cores": round(sum(cores[name] for name in CONTROL_PLANE), 3),
            "resident_mb": {name: round(g.largest / 1e6) for name, g in gauges.all.items()},
            "fleet_rounds": len(rounds),
            **_quantiles("fleet_round_seconds", [row["seconds"] for row in rounds]),
            **_quantiles("fleet_round_cpu_seconds", [row["cpu_seconds"] for row in rounds]),
            **_quantiles("api_seconds", requests.seconds),
            **{f"api_{route}_p99": each for route, each in requests.by_route().items()},
            "api_errors": requests.errors[:10],
            "stream_messages_per_second": round(requests.messages / seconds, 1),
            "heartbeats_per_second": round((after["beats"] - before["beats"]) / seconds, 1),
            "updates_per_second": round((after["pushes"] - before["pushes"]) / seconds, 1),
            "worker_errors": after["errors"] - before["errors"],
        }

    def lose(self) -> dict[str, Any]:
        """Take machines at once; return how soon the cloud was asked for all replacements, and how
        soon all have a worker.
        """
        lost = self._options.lost_machines
        before = self._all_rounds()[-1]
        assert self._controller.stdin is not None
        began = time.monotonic()
        self._controller.stdin.write(json.dumps({"lose": lost}).encode() + b"\n")
        self._controller.stdin.flush()
        self._await(
            lambda: self._all_rounds()[-1]["placed"] - before["placed"] >= lost,
            REPLACED_SECONDS,
            "replacement",
        )
        rounds = [row for row in self._all_rounds() if row["at"] > began]

        def first(name: str) -> dict[str, Any]:
            return next(row for row in rounds if row[name] - before[name] >= lost)

        return {
            "lost_machines": lost,
            "lost_decided_seconds": round(first("launched")["ordered_at"] - began, 2),
            "lost_replaced_seconds": round(first("placed")["at"] - began, 2),
        }

    def _pids(self) -> dict[str, int]:
        parts = {name: part.pid for name, part in self._state.parts.items() if part.pid}
        workers = {f"workers-{at}": each.pid for at, each in enumerate(self._workers)}
        return {**parts, "controller": self._controller.pid, **workers}

    def _counts(self) -> dict[str, int]:
        return {name: self._count(name) for name in ("beats", "pushes", "errors")}

    def _count(self, name: str) -> int:
        rows = (json.loads(path.read_text()) for path in self._states if path.exists())
        return sum(int(row[name]) for row in rows)

    def _all_rounds(self) -> list[dict[str, Any]]:
        if not self._rounds.exists():
            return []
        lines = self._rounds.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def _await(self, predicate: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not predicate():
            for name, process in (("controller", self._controller), *self._named_workers()):
                if process.poll() is not None:
                    raise StackError(f"{name} ended:\n{self._home.log_tail(name)}")
            if time.monotonic() > deadline:
                rows = [path.read_text()[:500] for path in self._states if path.exists()]
                raise StackError(f"no {what} within {seconds:.0f} s: {' '.join(rows)}")
            time.sleep(POLL_SECONDS)

    def _named_workers(self) -> list[tuple[str, subprocess.Popen[bytes]]]:
        return [("workers", each) for each in self._workers]


class Requests:
    """Requests to the API, as pages and scripts make them."""

    def __init__(self, api: httpx.Client, jobs: Sequence[str]) -> None:
        self._api = api
        self._jobs = jobs
        self.rows: list[tuple[str, float]] = []
        self.errors: list[str] = []
        self.messages = 0

    @property
    def seconds(self) -> list[float]:
        """Durations of all requests."""
        return [each for _, each in self.rows]

    def by_route(self) -> dict[str, float]:
        """Return the 99th percentile of the durations of each route, in seconds."""
        return {
            route: round(float(np.quantile([s for name, s in self.rows if name == route], 0.99)), 4)
            for route in ROUTES
            if any(name == route for name, _ in self.rows)
        }

    def repeat(self, stop: threading.Event) -> None:
        """Request each route once a second."""
        while not stop.wait(REQUEST_SECONDS / len(ROUTES)):
            route = ROUTES[len(self.rows) % len(ROUTES)]
            began = time.monotonic()
            try:
                self._api.get(route.format(job=self._jobs[0])).raise_for_status()
            except httpx.HTTPError as error:
                self.errors.append(f"{route}: {error}")
            self.rows.append((route, time.monotonic() - began))

    def follow(self, stop: threading.Event) -> None:
        """Read the stream of changes, as each open page does."""
        try:
            with self._api.stream("GET", "stream") as stream:
                for line in stream.iter_lines():
                    self.messages += line.startswith("data:")
                    if stop.is_set():
                        return
        except httpx.HTTPError as error:
            self.errors.append(f"stream: {error}")


def _spec(options: ControlBenchOptions, workers: int) -> JobSpec:
    # More samples than are trained, so that no epoch ends and no evaluation starts.
    return JobSpec.parse(
        {
            "name": "bench",
            "task": "bench:Task",
            "args": {"samples": 64 * options.subtasks},
            "epochs": 1,
            "subtasks_per_epoch": options.subtasks,
            "push_every": 1,
            "update": {"rule": "async-local-sgd", "eta": 1.0},
            "workers": {"min": 0, "max": workers, "pools": [POOL]},
        }
    )


def _add_finished(ledger: RedisClient, count: int) -> None:
    """Add jobs that were submitted and cancelled earlier."""
    jobs = Jobs(ledger)
    for _ in range(count):
        jobs.cancel(jobs.submit(_spec(ControlBenchOptions(), 1), package="none").id)


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_p{q}": round(float(np.quantile(values, q / 100)), 4) for q in (50, 99)}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
