"""vcasgd as a contender: a stack of its own, whose controller replaces machines."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.goodput import Observations
from benchmarks.measure.goodput_run import Fleet, MachineObserver
from cnn import make_model
from common import CNN, SNAPSHOT_SECONDS
from entrants import Entrant
from outcomes import Workload
from vcasgd.chaos.killers import Killer
from vcasgd.client import Client
from vcasgd.errors import StoreError
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.learning.layout import Layout
from vcasgd.learning.vector import scatter
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, running
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

    def __init__(
        self,
        workload: Workload,
        folder: Path,
        data: Path,
        entrant: Entrant,
        column_at_once: int,
    ) -> None:
        self._workload, self._folder, self._data = workload, folder, data
        self._rounds = {} if entrant.chooses_rounds else {"push_every": workload.sync_every}
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
        self._settings = self._choose_settings()
        self._state = self._resources.enter_context(running(self._settings))
        self._home = StackHome(self._settings.home_path)
        self._client = Client(self._state.api_url, self._home.token() or "")
        self._resources.callback(self._client.close)
        self._job = self._client.submit_directory(self._spec()).id
        self._jobs = Jobs(self._connect("ledger"))
        fleet = self._open_fleet()
        snapshots = SnapshotStore(self._connect("tensors"), TensorKeys(self._job))
        self._observer = (
            SnapshotObserver(fleet, self._jobs, snapshots, self._job, self._folder / "snapshots")
            if self._workload.model == CNN
            else MachineObserver(fleet, self._jobs, snapshots, self._job)
        )
        self._observer.start()
        self._resources.callback(self._observer.stop)

    def _choose_settings(self) -> Settings:
        return Settings(home=self._folder / "home", local_capacity=self._capacity, api_port=0)

    def _open_fleet(self) -> Fleet:
        """Return the machines, which the stack starts or which join it."""
        settings = self._settings
        pool = LocalPoolSpec(name="local", provider="local", max_machines=settings.local_capacity)
        self._provider = LocalProvider(self._home.path, settings.cluster, pool)
        self._killer = Killer(
            self._home,
            self._provider,
            self._jobs,
            self._job,
            heartbeat=settings.heartbeat,
            services={},
        )
        return self._provider

    def _connect(self, name: str) -> RedisClient:
        password = self._home.ensure_password(name)
        url = f"redis://:{password}@127.0.0.1:{self._state.ports[name]}/0"
        return connect(url, answer_seconds=1.0)

    def _spec(self) -> JobSpec:
        workload, data = self._workload, {"data": str(self._data)}
        learns = workload.model == CNN
        return JobSpec.parse(
            {
                "name": "race",
                "task": "raced_task:RacedMnist" if learns else "raced_task:RacedTransformer",
                "working_dir": str(WORKERS),
                "args": {
                    **(data if learns else {}),
                    "folder": str(self._folder),
                    # Each machine trains its part of a batch in a step.
                    "batch_size": workload.batch * workload.workers,
                    "pace": 1 / workload.pace,
                },
                "epochs": EPOCHS,
                **self._rounds,
                "workers": {"min": 1, "max": workload.workers},
                **self._update(),
            }
        )

    def _update(self) -> dict[str, Any]:
        """Return the field ``update`` of the job, unless it is the default."""
        return {}

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
        fleet: Fleet,
        jobs: Jobs,
        snapshots: SnapshotStore,
        job: str,
        folder: Path,
    ) -> None:
        super().__init__(fleet, jobs, snapshots, job)
        self._store, self._folder = snapshots, folder
        self._model = make_model()
        self._layout = Layout.of(self._model)
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
            scatter(vector, meta.integer_vector(), self._model, self._layout)
            state = self._model.state_dict()
            torch.save({"at": now, "state": state}, self._folder / f"{now:.1f}.pt")
