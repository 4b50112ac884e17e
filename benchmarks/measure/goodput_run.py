"""A paced job on a stack of its own whose machines are lost, and what that costs."""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks.measure.goodput import GoodputFigures, MachineLife, Observations
from vcasgd.chaos.faults import await_fault
from vcasgd.chaos.killers import Killer
from vcasgd.client import Client
from vcasgd.errors import StackError, StoreError
from vcasgd.fleet.histories import machines
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.schemas.fleet import Machine
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.tensors.snapshot_store import SnapshotStore

#: Samples for which a worker trains ``pace_ms``.
SHARE = 64
POLL_SECONDS = 0.05
#: Seconds for the progress to settle, because workers first choose how long their rounds are.
SETTLE_SECONDS = 60.0
#: Seconds for the job to end once its steps take no time.
FINISH_SECONDS = 300.0
Log = Callable[[str], None]


@dataclass(frozen=True)
class GoodputOptions:
    """Conditions of a run; see the options of ``python -m benchmarks.measure goodput``.

    ``notice`` is the length of the notice in seconds; None kills machines without one.
    """

    workers: int = 4
    seconds: float = 60.0
    quiet_seconds: float = 30.0
    evict_every: float = 15.0
    at_once: int = 1
    notice: float | None = None
    kill_part: str | None = None
    pace_ms: float = 80.0
    epoch_samples: int = 16_384
    slow: float = 1.0
    trace: Path | None = None
    faster: float = 1.0
    seed: int = 0

    def losses(self) -> list[float]:
        """Return when machines are lost, in seconds since the end of the quiet time; ascending."""
        if self.trace is not None:
            lives = machines(self.workers, self.trace, self.faster, self.seed)
            return sorted(each.stop for each in lives if each.stop < self.seconds)
        count = math.ceil(self.seconds / self.evict_every) - 1 if self.evict_every else 0
        times = [self.evict_every * (each + 1) for each in range(count)]
        return [each for each in times for _ in range(self.at_once)]

    @property
    def pace(self) -> float:
        """Samples per second of a machine that does nothing but steps."""
        return SHARE / (self.pace_ms / 1000)

    def spec(self, folder: Path) -> JobSpec:
        """Return a job that trains until the file ``hold`` is removed from the folder."""
        rate = self.workers * self.pace
        batch = SHARE * self.workers
        return JobSpec.parse(
            {
                "name": "goodput",
                "task": "paced:Paced",
                "working_dir": str(Path(__file__).parent / "task"),
                "args": {
                    "samples": self.epoch_samples,
                    "batch_size": batch,
                    "share": SHARE,
                    "pace": self.pace_ms / 1000,
                    "slower": self.slow,
                    "hold": str(folder / "hold"),
                    "slow": str(folder / "slow"),
                },
                # Twice as many as it needs; the rest takes no time.
                "epochs": math.ceil(
                    2
                    * rate
                    * (self.seconds + self.quiet_seconds + SETTLE_SECONDS)
                    / self.epoch_samples
                ),
                "workers": {"min": 1, "max": self.workers},
            }
        )


def measure_goodput(options: GoodputOptions, settings: Settings, log: Log) -> GoodputFigures:
    """Run a job, lose machines, and return what that costs.

    Raises :class:`StackError` if a fault doesn't fire or the job doesn't end.
    """
    folder = Path(tempfile.mkdtemp(prefix="vcasgd-goodput-"))
    try:
        # A machine with a notice and its replacement exist at the same time.
        capacity = options.workers + options.at_once + 1
        own = {"home": folder / "home", "local_capacity": capacity, "api_port": 0}
        others = dict.fromkeys(("ledger_url", "tensors_url", "storage_url", "token"))
        stack = settings.model_copy(update={**own, **others})
        with running(stack) as state, contextlib.ExitStack() as resources:
            run = _GoodputRun(options, stack, state, folder, log)
            resources.callback(run.close)
            return run.measure()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _GoodputRun:
    def __init__(
        self, options: GoodputOptions, settings: Settings, state: StackState, folder: Path, log: Log
    ) -> None:
        self._options, self._folder, self._log = options, folder, log
        self._random = random.Random(options.seed)
        home = StackHome(settings.home_path)
        self._client = Client(state.api_url, home.token() or "")
        pool = LocalPoolSpec(name="local", provider="local", max_machines=settings.local_capacity)
        self._provider = LocalProvider(home.path, settings.cluster, pool)
        (folder / "hold").touch()
        self._job = self._client.submit_directory(options.spec(folder)).id
        ledger, tensors = (_connect(home, state, name) for name in ("ledger", "tensors"))
        self._jobs = Jobs(ledger)
        self._killer = Killer(
            home, self._provider, self._jobs, self._job, heartbeat=settings.heartbeat, services={}
        )
        self._observer = MachineObserver(
            self._provider, self._jobs, SnapshotStore(tensors, TensorKeys(self._job)), self._job
        )
        self._observer.start()

    def close(self) -> None:
        self._observer.stop()
        self._client.close()

    def measure(self) -> GoodputFigures:
        options, seen = self._options, self._observer.seen
        await_fault(self._all_push, f"no {options.workers} machines that push")
        self._log(f"{options.workers} machines train")
        settled_after = self._settle()
        self._log(f"{options.quiet_seconds:g} s without faults")
        quiet = self._wait(options.quiet_seconds)
        self._choose_slow()
        before = self._wasted()
        start = time.time()
        for at in options.losses():
            time.sleep(max(0.0, start + at - time.time()))
            self._lose(at)
        time.sleep(max(0.0, start + options.seconds - time.time()))
        faulty = (start, time.time())
        if not self._observer.is_alive():
            raise StackError("the thread that observes the machines ended with an error")
        wasted = {name: seconds - before[name] for name, seconds in self._wasted().items()}
        figures = GoodputFigures.of(seen, quiet, faulty, wasted, options.pace)
        (self._folder / "hold").unlink()
        job = self._client.job(self._job).wait(FINISH_SECONDS)
        if job.state != "succeeded":
            raise StackError(f"the job {job.state}: {job.reason}")
        progress = job.progress
        return replace(
            figures,
            settled_after_s=settled_after,
            samples_lost=progress.samples_lost,
            samples_repeated=progress.samples_repeated,
        )

    def _wait(self, seconds: float) -> tuple[float, float]:
        start = time.time()
        time.sleep(seconds)
        return start, time.time()

    def _settle(self) -> float | None:
        """Wait for even progress, and return how long it took; None if there was none."""
        start = time.time()
        while (now := time.time()) < start + SETTLE_SECONDS:
            if self._observer.seen.is_settled(start, now - POLL_SECONDS):
                return round(now - start, 1)
            time.sleep(POLL_SECONDS)
        self._log(f"the progress did not settle in {SETTLE_SECONDS:g} s")
        return None

    def _all_push(self) -> bool:
        lives = self._observer.seen.machines.values()
        return sum(each.pushed is not None for each in lives) >= self._options.workers

    def _choose_slow(self) -> None:
        if self._options.slow > 1:
            name = min(one.id for one in self._killer.busy_machines())
            (self._folder / "slow").write_text(name)

    def _wasted(self) -> Mapping[str, float]:
        wasted = self._client.job(self._job).cost().wasted
        return {
            "booting": wasted.booting.seconds,
            "idle": wasted.idle.seconds,
            "lost work": wasted.lost_work.seconds,
        }

    def _lose(self, at: float) -> None:
        options = self._options
        if options.kill_part is not None:
            self._log(f"{at:6.1f} s: kill {options.kill_part}")
            self._killer.kill_part(options.kill_part, self._random)
            return
        machine = self._random.choice(await_fault(self._victims, "no machine that trains"))
        if options.notice is None:
            self._log(f"{at:6.1f} s: kill {machine.id}")
            self._provider.kill(machine.id)
        else:
            self._log(f"{at:6.1f} s: {options.notice:g} s of notice to {machine.id}")
            self._provider.evict(machine.id, options.notice)

    def _victims(self) -> list[Machine]:
        slow = self._folder / "slow"
        spared = slow.read_text() if slow.exists() else ""
        return sorted(
            (one for one in self._killer.busy_machines() if one.id != spared),
            key=lambda one: one.id,
        )


def _connect(home: StackHome, state: StackState, name: str) -> RedisClient:
    url = f"redis://:{home.ensure_password(name)}@127.0.0.1:{state.ports[name]}/0"
    return connect(url, answer_seconds=1.0)


class Fleet(Protocol):
    """Machines of a run."""

    def machines(self) -> Sequence[Machine]:
        """Return those that exist now."""


class MachineObserver(threading.Thread):
    """Records machines, their first steps and pushes, and the samples applied, by Unix time."""

    def __init__(self, fleet: Fleet, jobs: Jobs, snapshots: SnapshotStore, job: str) -> None:
        super().__init__(name="goodput", daemon=True)
        self._fleet, self._jobs, self._snapshots, self._job = fleet, jobs, snapshots, job
        self._stopped = threading.Event()
        self._version = 0
        self.seen = Observations()

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Observe until :meth:`stop`. A server that is dead makes no progress."""
        while not self._stopped.wait(POLL_SECONDS):
            self._look_at_machines()
            with contextlib.suppress(StoreError):
                self._look_at_model()
            with contextlib.suppress(StoreError):
                self._look_at_workers()

    def _look_at_machines(self) -> None:
        now, seen = time.time(), self.seen
        present = {one.id: one for one in self._fleet.machines()}
        for name, one in present.items():
            seen.machines.setdefault(name, MachineLife(one.launched_at))
        for name, life in seen.machines.items():
            if name not in present and life.ended is None:
                life.ended = now
                seen.losses.append(now)

    def _look_at_model(self) -> None:
        meta = self._snapshots.read_meta()
        if meta.version != self._version:
            self._version = meta.version
            self.seen.progress.append((time.time(), meta.totals.samples))

    def _look_at_workers(self) -> None:
        now = time.time()
        for beat in self._jobs.workers.heartbeats(self._job).values():
            life = self.seen.machines.get(beat.machine or "")
            if life is None:
                continue
            if beat.steps and life.trained is None:
                life.trained = now
            if beat.pushes and life.pushed is None:
                life.pushed = now
