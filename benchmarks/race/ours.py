"""vcasgd as a contender: a stack of its own, whose controller replaces machines."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from cnn import make_model
from common import SNAPSHOT_SECONDS
from outcomes import Workload
from vcasgd.bench.goodput import Observations
from vcasgd.bench.goodput_run import MachineObserver
from vcasgd.chaos.killers import Killer
from vcasgd.client import Client
from vcasgd.errors import StoreError
from vcasgd.fleet.providers.local.provider import LocalPool, LocalProvider
from vcasgd.learning.layout import Layout
from vcasgd.learning.vector import named_tensors
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.tensors.snapshot_store import SnapshotStore

WORKERS = Path(__file__).resolve().parent / "workers"
#: Parts that are killed in turn.
PARTS = ("server", "tensors", "ledger", "controller", "head")
#: More epochs than a run makes.
EPOCHS = 1000


class OurCluster:
    """A stack with one job; the same interface as :class:`cluster.PeerCluster`."""

    def __init__(self, workload: Workload, folder: Path, data: Path, column_at_once: int) -> None:
        self._workload, self._folder, self._data = workload, folder, data
        # A machine with a notice and its replacement exist at the same time.
        self._capacity = workload.workers + column_at_once + 1
        self._resources = ExitStack()
        self._under_notice: set[str] = set()
        self._random = random.Random(0)
        (folder / "snapshots").mkdir()

    @property
    def trainers(self) -> int:
        """Number of machines that train at the same time."""
        return self._workload.workers

    def start(self) -> None:
        settings = Settings(home=self._folder / "home", local_capacity=self._capacity, api_port=0)
        state = self._resources.enter_context(running(settings))
        home = StackHome(settings.home_path)
        self._client = Client(state.api_url, home.token() or "")
        self._resources.callback(self._client.close)
        pool = LocalPool("local", settings.local_capacity)
        self._provider = LocalProvider(home.path, settings.cluster, pool)
        self._job = self._client.submit_directory(self._spec()).id
        ledger, tensors = (_connect(home, state, name) for name in ("ledger", "tensors"))
        jobs = Jobs(ledger)
        self._killer = Killer(
            home, self._provider, jobs, self._job, heartbeat=settings.heartbeat, services={}
        )
        snapshots = SnapshotStore(tensors, TensorKeys(self._job))
        self._observer = SnapshotObserver(
            self._provider, jobs, snapshots, self._job, self._folder / "snapshots"
        )
        self._observer.start()
        self._resources.callback(self._observer.stop)

    def _spec(self) -> JobSpec:
        workload = self._workload
        return JobSpec.parse(
            {
                "name": "race",
                "task": "raced_task:RacedMnist",
                "working_dir": str(WORKERS),
                "args": {
                    "data": str(self._data),
                    "folder": str(self._folder),
                    # Each machine trains its part of a batch in a step.
                    "batch_size": workload.batch * workload.workers,
                    "pace": 1 / workload.pace,
                },
                "epochs": EPOCHS,
                "push_every": workload.sync_every,
                "workers": {"min": 1, "max": workload.workers},
            }
        )

    def close(self) -> None:
        """Stop the stack with its machines."""
        self._resources.close()

    def contributors(self) -> list[str]:
        """Return the living machines without a notice that have changed the model."""
        training = {one.id for one in self._killer.busy_machines()} - self._under_notice
        lives = self._observer.seen.machines
        pushed = {name for name, life in list(lives.items()) if life.pushed is not None}
        return sorted(training & pushed)

    def kill(self, names: list[str]) -> None:
        for name in names:
            self._provider.kill(name)

    def notice(self, name: str, seconds: float) -> None:
        self._under_notice.add(name)
        self._provider.evict(name, seconds)

    def kill_coordinator(self, turn: int) -> str:
        part = PARTS[turn % len(PARTS)]
        self._killer.kill_part(part, self._random)
        return part

    def observations(self) -> Observations:
        if not self._observer.is_alive():
            raise RuntimeError("the thread that observes the machines ended with an error")
        return self._observer.seen

    def repeated(self) -> int | None:
        """Return the samples that were applied twice."""
        return self._client.job(self._job).progress.samples_repeated

    def why(self) -> str:
        return str(self._client.job(self._job).reason or "")


class SnapshotObserver(MachineObserver):
    """Also keeps a snapshot of the model now and then, as the peers do."""

    def __init__(
        self,
        provider: LocalProvider,
        jobs: Jobs,
        snapshots: SnapshotStore,
        job: str,
        folder: Path,
    ) -> None:
        super().__init__(provider, jobs, snapshots, job)
        self._store, self._folder = snapshots, folder
        self._layout = Layout.of(make_model())
        self._kept_at = 0.0

    def _look_at_model(self) -> None:
        super()._look_at_model()
        now = time.time()
        if now < self._kept_at + SNAPSHOT_SECONDS:
            return
        with suppress(StoreError):
            vector = torch.empty(self._store.read_meta().floats)
            meta = self._store.fetch_rounded(vector)
            self._kept_at = now
            state = named_tensors(self._layout, vector, meta.integer_vector())
            torch.save({"at": now, "state": state}, self._folder / f"{now:.1f}.pt")


def _connect(home: StackHome, state: StackState, name: str) -> RedisClient:
    url = f"redis://:{home.ensure_password(name)}@127.0.0.1:{state.ports[name]}/0"
    return connect(url, answer_seconds=1.0)
