"""Process: simulated workers with real leases, heartbeats, connections, and small updates.

It reads orders from a pipe, one JSON object per line: ``{"start": name, "arguments": {…}, "env":
{…}}`` as Ray would get it, and ``{"kill": name}``. Its state is in ``--state`` every second.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from vcasgd.errors import StoreDenied, StoreError, VcasgdError
from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.learning.length import plan_for
from vcasgd.logging import configure_logging
from vcasgd.spec.job import JobSpec
from vcasgd.store.acl import lease_pass
from vcasgd.store.connection import connect
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases, WorkKind
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import Meta, Record
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.store.tensors.updates import UpdateSender
from vcasgd.threads import EssentialThread

log = logging.getLogger(__name__)

#: Numbers in a model, which are all that an update has.
FLOATS = 64
#: Threads that execute what workers do; each call takes a fraction of a millisecond.
THREADS = 8
#: Seconds between two reports of the state.
REPORT_SECONDS = 1.0
#: Priority below that of the control plane.
NICENESS = 15
#: Lease in heartbeats, as in :class:`~vcasgd.settings.Settings`.
LEASE_HEARTBEATS = 8
LAYOUT = Layout((TensorEntry("weights", (FLOATS,), TensorKind.PARAMETER, 0),))
PAYLOAD = memoryview(torch.full((FLOATS,), 1e-6).numpy().tobytes())


@dataclass
class WorkersState:
    """Counters of all workers of a process. Times are in ms."""

    started: int = 0
    running: int = 0
    admitted: int = 0
    beats: int = 0
    pushes: int = 0
    errors: int = 0
    last_error: str = ""
    beat_ms: list[float] = field(default_factory=list)


class LightWorker:
    """One worker. Not thread-safe; its steps follow each other."""

    def __init__(self, order: dict[str, Any], heartbeat: float, push_seconds: float) -> None:
        env, arguments = order["env"], order["arguments"]
        self.name, self._job = arguments["worker"], arguments["job"]
        self._machine = arguments["machine"]
        self._heartbeat, self._push_seconds = heartbeat, push_seconds
        self._key = env.get("VCASGD_WORKER_KEY")
        self._ledger = connect(env["VCASGD_LEDGER_URL"])
        self._tensors = connect(env["VCASGD_TENSORS_URL"].split()[0])
        self._leases = Leases(
            self._ledger,
            self._job,
            self.name,
            heartbeat * LEASE_HEARTBEATS,
            lease_pass(self._key) if self._key else "",
        )
        self._sender = UpdateSender(self._tensors, TensorKeys(self._job), self._key)
        self._spec: JobSpec | None = None
        self._lease: Lease | None = None
        self._state = "starting"
        self._position = 0
        self._version = 0
        self._pushed: tuple[int, int, int, str] | None = None
        self._numbers = itertools.count(1)
        self.admitted = False
        self.push_at = 0.0
        self.pushes = 0

    def beat(self) -> None:
        """Send a heartbeat. Raises :class:`StoreError`."""
        held = [self._lease] if self._lease else []
        renewal = self._leases.renew(self._description(), held)
        self._state = renewal.state
        if renewal.lost:
            self._lease = None
        if not self.admitted:
            self._tensors.get(TensorKeys(self._job).meta)
            self.admitted = True

    def work(self) -> bool:
        """Do what is next; return True if an update was pushed. Raises :class:`VcasgdError`."""
        if self._state not in ("starting", "running") or not self.admitted:
            return False
        if self._lease is None:
            lease = self._leases.acquire()
            if not isinstance(lease, Lease):
                return False
            self._lease = lease
            if lease.kind is WorkKind.TRAIN:
                self._begin(lease)
        if self._lease.kind is WorkKind.INITIALISE:
            self._initialise(self._lease)
            return False
        return self._lease.kind is WorkKind.TRAIN and self._push(self._lease)

    def close(self) -> None:
        """Close all connections, as the end of a machine does."""
        for client in (self._ledger, self._tensors):
            client.close()
            client.connection_pool.disconnect()

    def _description(self) -> dict[str, Any]:
        return {
            "at": time.time(), "machine": self._machine, "host": "ip-10-0-0-1", "pid": 1,
            "doing": "training", "steps": self.pushes, "samples": self.pushes,
            "step_seconds": 0.1, "local_steps": 1, "version": self._version,
            "pushes": self.pushes, "pushed_bytes": self.pushes * len(PAYLOAD),
            "fetched_bytes": self.pushes * len(PAYLOAD), "pushed_again": 0, "discarded": 0,
            "unapplied": 1, "resident_bytes": 1 << 30, "memory_bytes": 1 << 34,
            "memory_free_bytes": 1 << 33, "cores": 8,
        }  # fmt: skip

    def _begin(self, lease: Lease) -> None:
        spec = self._specification()
        plan = plan_for(spec, spec.args["samples"], 1)
        self._position = self._sender.begin(
            lease.number, plan.epoch_of(lease.number), plan.size(lease.number), lease.token
        )

    def _push(self, lease: Lease) -> bool:
        spec = self._specification()
        plan = plan_for(spec, spec.args["samples"], 1)
        epoch = plan.epoch_of(lease.number)
        if self._pushed is not None:
            status = self._sender.status([self._pushed])
            self._version = status.version[0]
            if status.outcomes[0] == "pending":
                return False
        header = Header(
            update=f"{self.name}.{next(self._numbers)}",
            worker=self.name,
            subtask=lease.number,
            start=self._position,
            stop=self._position + 1,
            base=self._version,
            token=lease.token,
            codec="float32",
            size=len(PAYLOAD),
            checksum=xxh3_64_intdigest(PAYLOAD),
            layout=LAYOUT.digest(),
            batch=1.0,
        )
        self._sender.push(header, epoch, PAYLOAD)
        # A process may open 20,000 files.
        self._tensors.connection_pool.disconnect(inuse_connections=False)
        self._pushed = (lease.number, epoch, header.stop, header.update)
        self._position += 1
        self.pushes += 1
        if self._position == plan.size(lease.number):
            self._lease = None
        return True

    def _initialise(self, lease: Lease) -> None:
        spec = self._specification()
        samples = spec.args["samples"]
        meta = Meta(
            version=0, token=0, floats=FLOATS, parameters=FLOATS, layout=LAYOUT.digest(),
            halves=False, integers="",
        )  # fmt: skip
        snapshots = SnapshotStore(self._tensors, TensorKeys(self._job))
        snapshots.install(0, meta, Record(), torch.zeros(FLOATS))
        facts = ModelFacts(
            samples, 1, LAYOUT.to_json(), plan_for(spec, samples, 1).order_digest(),
            batch_size=1, subtasks_per_epoch=spec.subtasks_per_epoch,
        )  # fmt: skip
        self._leases.report_facts(lease, facts.to_dict())
        self._lease = None

    def _specification(self) -> JobSpec:
        if self._spec is None:
            spec = Jobs(self._ledger).get(self._job).spec
            self._spec = _SPECS.setdefault(self._job, spec)
        return self._spec


#: Specifications by job, which the workers of a process share.
_SPECS: dict[str, JobSpec] = {}


class Schedule:
    """Steps of all workers of this process, each at its time."""

    def __init__(self, heartbeat: float, push_seconds: float) -> None:
        self._heartbeat, self._push_seconds = heartbeat, push_seconds
        self._workers: dict[str, LightWorker] = {}
        self._due: list[tuple[float, int, str, str]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self.state = WorkersState()
        self._random = random.Random(1)

    def start(self, order: dict[str, Any]) -> None:
        worker = LightWorker(order, self._heartbeat, self._push_seconds)
        now = time.monotonic()
        with self._changed:
            self._workers[worker.name] = worker
            self.state.started += 1
            self._plan(now, worker.name, "beat")
            self._plan(now + self._random.uniform(0, self._push_seconds), worker.name, "work")

    def kill(self, name: str) -> None:
        with self._changed:
            worker = self._workers.pop(name, None)
        if worker:
            worker.close()

    def run(self) -> None:
        """Execute steps when they are due, forever."""
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    pause = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(pause)
                due, _, name, step = heapq.heappop(self._due)
                worker = self._workers.get(name)
            if worker is not None:
                self._step(worker, step, due)

    def report(self) -> dict[str, Any]:
        """Return the state, and begin a new list of durations."""
        with self._changed:
            present = list(self._workers.values())
            self.state.running = len(present)
            self.state.admitted = sum(each.admitted for each in present)
            row = asdict(self.state)
            self.state.beat_ms = []
        return row

    def _step(self, worker: LightWorker, step: str, due: float) -> None:
        started, period = time.monotonic(), self._push_seconds
        try:
            if step == "beat":
                period = self._heartbeat
                worker.beat()
                self.state.beats += 1
                self.state.beat_ms.append(round(1000 * (time.monotonic() - started), 2))
            elif worker.work():
                self.state.pushes += 1
        except StoreDenied:
            log.debug("%s is not admitted yet", worker.name)
        except (StoreError, VcasgdError, OSError) as error:
            self.state.errors += 1
            self.state.last_error = str(error)
        with self._changed:
            self._plan(max(due + period, time.monotonic()), worker.name, step)

    def _plan(self, at: float, worker: str, step: str) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), worker, step))
        self._changed.notify()


class Loop(EssentialThread):
    """Thread that runs a function, which doesn't return."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        super().__init__(name)
        self._function = function

    def work(self) -> None:
        self._function()


def _report(schedule: Schedule, path: Path) -> None:
    """Write the state to a file, again and again."""
    while True:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(schedule.report()))
        new.replace(path)
        time.sleep(REPORT_SECONDS)


def _orders(path: str) -> Iterator[dict[str, Any]]:
    with Path(path).open() as pipe:
        for line in pipe:
            yield json.loads(line)


def main() -> int:
    """Run workers until the pipe ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipe", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--heartbeat", type=float, required=True)
    parser.add_argument("--push-seconds", type=float, required=True)
    options = parser.parse_args()
    configure_logging("workers")
    # They stand for other machines, and must not take the processors of what is measured.
    os.nice(NICENESS)
    torch.set_num_threads(1)
    schedule = Schedule(options.heartbeat, options.push_seconds)
    for number in range(THREADS):
        Loop(f"steps {number}", schedule.run).start()
    Loop("report", partial(_report, schedule, options.state)).start()
    for order in _orders(options.pipe):
        if "start" in order:
            schedule.start(order)
        else:
            schedule.kill(order["kill"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
