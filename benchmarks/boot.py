"""Measure how long the replacement of a lost local machine takes, part by part.

    python benchmarks/boot.py [--losses 5]

Trains with one machine, kills it repeatedly, and writes ``benchmarks/results/boot.md``. Times come
from files, Ray's logs, and the stores, which are read every few milliseconds. Then does the same
with a spare machine. Stop other programs before you run it.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import machine
from markdown import table
from vcasgd.client import Client
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.schemas.fleet import Machine
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, running
from vcasgd.store.connection import connect
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.tensors.snapshot_store import SnapshotStore

T = TypeVar("T")

OUT = Path(__file__).resolve().parent / "results" / "boot.md"
TASK = Path(__file__).resolve().parent / "measure" / "task"
POLL_SECONDS = 0.005
PATIENCE_SECONDS = 180.0
#: Seconds of training between two losses.
PAUSE_SECONDS = 3.0
#: Events of a replacement, in order.
PARTS = (
    "killed",
    "ordered",
    "machine runs",
    "Ray's node starts",
    "node has joined",
    "worker is requested",
    "worker's process runs",
    "first update is in the model",
)

PAGE = """\
# Replacing a local machine

    {command}

One worker whose local steps take 5 ms. Its machine is killed {options.losses} times. Seconds since
the kill, median and range:

{machine}

{table}

`VCASGD_HEARTBEAT` is 1 s, so the controller looks every 0.5 s for lost machines, and every 0.1 s
while one starts.

With `workers.spare: 1`, the first update of the spare machine is in the model {spare} s after the
kill (median, and range).
"""


@dataclass(frozen=True)
class Options:
    losses: int
    out: Path


class Bench:
    """A stack with a job on one machine."""

    def __init__(
        self, settings: Settings, api_url: str, ports: dict[str, int], ray: Path, spare: int
    ) -> None:
        home = StackHome(settings.home_path)
        self._home, self._ray = settings.home_path, ray
        self._provider = LocalProvider(
            settings.home_path,
            settings.cluster,
            LocalPoolSpec(name="local", provider="local", max_machines=settings.local_capacity),
        )
        self._client = Client(api_url, home.token() or "")
        (self._home / "hold").touch()
        self._job = self._client.submit_directory(self._spec(spare)).id
        ledger, tensors = (
            connect(f"redis://:{home.ensure_password(name)}@127.0.0.1:{ports[name]}/0")
            for name in ("ledger", "tensors")
        )
        self._jobs = Jobs(ledger)
        self._snapshots = SnapshotStore(tensors, TensorKeys(self._job))

    def _spec(self, spare: int) -> JobSpec:
        args = {"samples": 65_536, "batch_size": 64, "share": 64, "pace": 0.005, "slower": 1.0}
        files = {"hold": str(self._home / "hold"), "slow": str(self._home / "slow")}
        workers = {"min": 1, "max": 1, "spare": spare}
        return JobSpec.parse(
            {
                "name": "boot",
                "task": "paced:Paced",
                "working_dir": str(TASK),
                "args": args | files,
                "epochs": 1000,
                "push_every": 5,
                "update": {"rule": "async-local-sgd"},
                "workers": workers,
            }
        )

    def version(self) -> int:
        return self._snapshots.read_meta().version

    def start(self) -> None:
        """Wait until the first machine trains."""
        _await(lambda: self._has_model() and self.version() >= 20)

    def _has_model(self) -> bool:
        return self._client.job(self._job).state == "running"

    def replace(self) -> dict[str, float]:
        """Kill the machine and return when its replacement did each part, in Unix seconds."""
        (old,) = self._provider.machines()
        times = {"killed": time.time()}
        self._provider.kill(old.id)
        # Updates that were under way are applied within a moment.
        new = _await(self._replacement)
        version = self.version()
        folder = self._home / "machines" / new.id
        times["ordered"] = new.launched_at
        times["machine runs"] = _await(lambda: _modified(folder / "machine.json"))
        sockets = self._ray / new.id
        times["Ray's node starts"] = _await(lambda: _modified(sockets / "forks"))
        log = _await(lambda: next(iter(sockets.glob("session_2*/logs/raylet.out")), None))
        times["node has joined"] = _await(lambda: _logged(log, "IsAlive = 1"))
        times["worker is requested"] = _await(lambda: _logged(log, "Started worker process"))
        times["worker's process runs"] = _await(lambda: self._first_beat(new.id))
        _await(lambda: self.version() > version)
        times["first update is in the model"] = time.time()
        return times

    def replace_by_spare(self) -> float:
        """Kill the machine that works when the spare one has joined; return the seconds until a new
        update is in the model.
        """
        _await(lambda: sum(row.joined for row in self._client.machines()) == 2)
        time.sleep(PAUSE_SECONDS)
        workers = self._jobs.workers.heartbeats(self._job).values()
        machines = {one.id for one in self._provider.machines()}
        (busy,) = {each.machine for each in workers} & machines
        killed = time.time()
        self._provider.kill(busy)
        _await(lambda: busy not in {one.id for one in self._provider.machines()})
        # Updates that were under way are applied within a moment.
        time.sleep(0.1)
        version = self.version()
        _await(lambda: self.version() > version)
        return time.time() - killed

    def _replacement(self) -> Machine | None:
        return next(iter(self._provider.machines()), None)

    def _first_beat(self, machine: str) -> float | None:
        beats = self._jobs.workers.heartbeats(self._job).values()
        return next((time.time() for each in beats if each.machine == machine), None)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _logged(path: Path, text: str) -> float | None:
    """Return the time of the first line of a log of Ray with a text."""
    for line in path.read_text().splitlines():
        found = re.match(r"\[([\d-]+ [\d:,]+) ", line)
        if text in line and found:
            return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
    return None


def _await(condition: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"nothing within {PATIENCE_SECONDS:g} s")


@contextmanager
def _bench(spare: int) -> Iterator[Bench]:
    """Train on one machine, with so many spare ones."""
    with tempfile.TemporaryDirectory(prefix="vcasgd-boot-") as folder:
        settings = Settings(home=Path(folder), api_port=0, local_capacity=1 + spare)
        with running(settings) as state:
            ports, ray = dict(state.ports), Path(state.scratch)
            bench = Bench(settings, state.api_url or "", ports, ray, spare)
            bench.start()
            yield bench


def measure(options: Options) -> list[dict[str, float]]:
    """Return the times of all replacements."""
    found = []
    with _bench(spare=0) as bench:
        for _ in range(options.losses):
            found.append(bench.replace())
            print({name: round(at - found[-1]["killed"], 2) for name, at in found[-1].items()})
            time.sleep(PAUSE_SECONDS)
    return found


def measure_spare(options: Options) -> list[float]:
    """Return the seconds of all replacements by a spare machine."""
    found = []
    with _bench(spare=1) as bench:
        for _ in range(options.losses):
            found.append(bench.replace_by_spare())
            print(f"by a spare machine: {found[-1]:.2f}")
    return found


def report(found: list[dict[str, float]], by_spare: list[float], options: Options) -> str:
    """Return the page."""
    rows = []
    for name in PARTS:
        median, spread = _summary([times[name] - times["killed"] for times in found])
        rows.append([name, median, spread])
    median, spread = _summary(by_spare)
    return PAGE.format(
        command=f"python benchmarks/boot.py --losses {options.losses}",
        options=options,
        spare=f"{median} ({spread})",
        machine=table(("", ""), machine.describe().items()),
        table=table(("", "seconds", "range"), rows),
    )


def _summary(seconds: list[float]) -> tuple[str, str]:
    """Return the median and the range."""
    return f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}–{max(seconds):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    options = Options(**vars(parser.parse_args()))
    page = report(measure(options), measure_spare(options), options)
    options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
