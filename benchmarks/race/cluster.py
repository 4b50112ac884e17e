"""Machines of a peer on this computer: started, killed, and replaced as a cloud would."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure.goodput import Observations
from entrants import WORKERS, Entrant
from environments import python_of
from links import LOCAL, Links, Place
from outcomes import Row, Workload, observe, parse_lines
from vcasgd.fleet.providers.local.processes import MARKER, Process, kill_all

POLL_SECONDS = 0.05
#: Seconds between the ends of machines that fail at once, and their replacements.
MIN_LIFE_SECONDS = 1.0
COORDINATOR = "coordinator"


@dataclass
class Machine:
    """A process with its descendants."""

    name: str
    process: subprocess.Popen[bytes]
    launched: float
    ended: float | None = None
    #: When a machine with a notice is killed; None without one.
    deadline: float | None = None
    replaced: bool = field(default=False)


class PeerCluster:
    """Keeps as many machines as the entrant has. A replacement starts at the loss or the notice."""

    def __init__(
        self,
        entrant: Entrant,
        workload: Workload,
        folder: Path,
        data: Path,
        links: Links | None = None,
    ) -> None:
        self._entrant, self._workload, self._folder, self._data = entrant, workload, folder, data
        self._links = links
        self._machines: dict[str, Machine] = {}
        self._coordinator: Machine | None = None
        self._address = f"{links.hub if links else LOCAL}:{_free_port()}"
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._supervise, name="cluster", daemon=True)
        (folder / "logs").mkdir()
        (folder / "progress").mkdir()

    @property
    def trainers(self) -> int:
        """Number of machines that train at the same time."""
        return self._entrant.trainers or self._workload.workers

    def start(self) -> None:
        if self._entrant.has_coordinator:
            self._coordinator = self._spawn(COORDINATOR, COORDINATOR)
        for _ in range(self._entrant.machines or self._workload.workers):
            self._add()
        self._thread.start()

    def close(self) -> None:
        """Kill everything."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        for machine in [*self._machines.values(), self._coordinator]:
            if machine is not None:
                _end(machine)

    def contributors(self) -> list[str]:
        """Return the living machines without a notice that have changed the model."""
        with self._lock:
            living = [
                each.name
                for each in self._machines.values()
                if each.ended is None and each.deadline is None
            ]
        seen = self.observations()
        return sorted(name for name in living if seen.machines[name].pushed is not None)

    def kill(self, names: list[str]) -> None:
        with self._lock:
            machines = [self._machines[name] for name in names]
            for machine in machines:
                _signal(machine, signal.SIGKILL)
            for machine in machines:
                _end(machine)
                machine.ended = time.time()

    def notice(self, name: str, seconds: float) -> None:
        with self._lock:
            machine = self._machines[name]
            machine.deadline = time.time() + seconds
            # Not to its children: a supervisor passes the signal on, or doesn't.
            machine.process.terminate()

    def kill_coordinator(self, _turn: int) -> str:
        with self._lock:
            assert self._coordinator is not None
            _end(self._coordinator)
            self._coordinator = self._spawn(COORDINATOR, COORDINATOR)
        return COORDINATOR

    def observations(self) -> Observations:
        with self._lock:
            launched = {each.name: each.launched for each in self._machines.values()}
            ended = {each.name: each.ended for each in self._machines.values() if each.ended}
        return observe(launched, ended, {name: self._lines(name) for name in launched})

    def repeated(self) -> int | None:
        """Return the samples that were counted twice; no peer knows."""
        return None

    def why(self) -> str:
        """Return the last lines of the logs of machines that have ended."""
        logs = sorted((self._folder / "logs").iterdir(), key=lambda path: path.stat().st_mtime)
        lines = [line for log in logs[-2:] for line in log.read_text(errors="replace").splitlines()]
        return " / ".join(lines[-3:])[-500:]

    def _lines(self, name: str) -> list[Row]:
        path = self._folder / "progress" / f"{name}.jsonl"
        return parse_lines(path.read_text()) if path.exists() else []

    def _supervise(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            with self._lock:
                for machine in list(self._machines.values()):
                    self._look_at(machine)
                self._look_at_coordinator()

    def _look_at(self, machine: Machine) -> None:
        now = time.time()
        if machine.ended is None:
            late = machine.deadline is not None and now > machine.deadline
            if late or machine.process.poll() is not None:
                _end(machine)
                machine.ended = now
        going = machine.ended is not None or machine.deadline is not None
        if going and not machine.replaced and now > machine.launched + MIN_LIFE_SECONDS:
            machine.replaced = True
            self._add()

    def _look_at_coordinator(self) -> None:
        machine = self._coordinator
        if machine is None or machine.process.poll() is None:
            return
        if time.time() > machine.launched + MIN_LIFE_SECONDS:
            _end(machine)
            self._coordinator = self._spawn(COORDINATOR, COORDINATOR)

    def _add(self) -> None:
        name = f"machine-{len(self._machines)}"
        self._machines[name] = self._spawn("worker", name)

    def _spawn(self, role: str, name: str) -> Machine:
        workload = self._workload
        place = self._links.place() if self._links and role != COORDINATOR else Place()
        options = {
            "role": role,
            "folder": self._folder,
            "machine": name,
            "coordinator": self._address,
            "address": place.address,
            "workers": workload.workers,
            "batch": workload.batch,
            "model": workload.model,
            "pace": workload.pace_ms / 1000,
            "sync-every": workload.sync_every,
            "data": self._data,
        }
        argv = [str(python_of(self._entrant.environment)), str(WORKERS / self._entrant.script)]
        argv += [part for key, value in options.items() for part in (f"--{key}", str(value))]
        environment = {
            **os.environ,
            MARKER: _mark(name),
            "OMP_NUM_THREADS": "1",
            "RACE_MACHINE": name,
            "TMPDIR": str(self._folder),
        }
        # It would lead to packages of another environment.
        environment.pop("PYTHONPATH", None)
        with (self._folder / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                place.command(argv),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        return Machine(name, process, time.time())


def _mark(name: str) -> str:
    return f"race-{os.getpid()}:{name}"


def _signal(machine: Machine, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(machine.process.pid, number)


def _end(machine: Machine) -> None:
    """Kill a machine with all processes that it started."""
    _signal(machine, signal.SIGKILL)
    try:
        root = Process.of(machine.process.pid)
    except ProcessLookupError:
        root = None
    kill_all(_mark(machine.name), root)
    machine.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])
