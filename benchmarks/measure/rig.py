"""The processes of a measurement and their connections.

The servers belong to a stack that its supervisor starts in a temporary folder. Each worker is a
separate process, as on a machine of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from pydantic import SecretStr

from benchmarks.measure.tally import Tally
from vcasgd.errors import StackError
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import ForegroundStack, StackHome
from vcasgd.stack.child import die_with_parent
from vcasgd.store.acl import LEDGER_SCRIPTS, AclUsers, ledger_user
from vcasgd.store.admission import worker_environment
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.embedded import ServerFiles
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Servers
from vcasgd.store.tensors.snapshot import Snapshot
from vcasgd.store.tensors.snapshot_index import nodes_of
from vcasgd.store.tensors.snapshot_store import SnapshotStore

#: Parts of a stack that exchange updates.
PARTS = ("ledger", "tensors", "server")
#: Seconds for the first snapshot: an interpreter, torch, and the vector.
READY_SECONDS = 120.0
#: Extra seconds per worker; the interpreters of many workers share the processors.
READY_SECONDS_PER_WORKER = 6.0
#: Seconds for a worker to push its last update and exit.
STOP_SECONDS = 15.0
POLL_SECONDS = 0.05
#: Pushes in one lease.
PUSHES_PER_SUBTASK = 64
#: More subtasks than a soak test completes, so that no epoch ends and no evaluation starts.
SUBTASKS = 1 << 14


@dataclass(frozen=True)
class BenchWorkload:
    """Workload of a measurement.

    A vector of ``floats`` numbers is sharded over ``nodes`` store nodes. With ``near``, workers
    use the tensors server's Unix socket instead of TCP. ``fresh``: workers write each update into
    memory as the product's do, instead of sending the same one again. ``rule`` is the update rule.
    """

    floats: int
    workers: int
    codec: str
    nodes: int = 1
    near: bool = False
    fresh: bool = False
    rule: str = "async-local-sgd"

    @property
    def model_bytes(self) -> int:
        return self.floats * 4

    def spec(self) -> JobSpec:
        samples = PUSHES_PER_SUBTASK * SUBTASKS
        return JobSpec.parse(
            {
                "name": "bench",
                "task": "benchmarks.measure.worker:Synthetic",
                "args": {"floats": self.floats, "samples": samples},
                "epochs": 1,
                "subtasks_per_epoch": SUBTASKS,
                "push_every": 1,
                "update": {"rule": self.rule, "codec": self.codec},
                "workers": {"min": 0, "max": self.workers},
            }
        )


class Rig:
    """Context manager that starts the processes and stops them, also after an error or Ctrl-C.

    Enter and exit it in the main thread, because the processes die with that thread.
    """

    def __init__(self, workload: BenchWorkload, settings: Settings) -> None:
        self._workload = workload
        self._resources = ExitStack()
        self._settings = settings
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._tallies: dict[str, Tally] = {}

    def __enter__(self) -> Rig:
        """Start the servers. Raises :class:`StackError`."""
        with self._resources:
            folder = Path(tempfile.mkdtemp(prefix="vcasgd-bench-"))
            self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
            settings = self._settings.model_copy(
                update={"home": folder / "home", "store_nodes": self._workload.nodes}
            )
            stack = ForegroundStack(settings, PARTS)
            self._resources.callback(stack.stop)
            self._resources.callback(self.stop_workers)
            self._state = stack.await_ready()
            self._folder, self._home = folder, StackHome(settings.home)
            self._ledger = connect(self._files("ledger").url)
            self._tensors = [connect(files.url) for files in self._nodes()]
            self._resources = self._resources.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.__exit__(kind, error, trace)

    def _files(self, name: str) -> ServerFiles:
        password = self._home.ensure_password(name)
        return ServerFiles(self._home.path / name, self._state.ports[name], password)

    def _nodes(self) -> list[ServerFiles]:
        """Return the tensors servers in the order of the store nodes."""
        return [self._files(name) for name in self._state.parts if name.startswith("tensors")]

    # -- the job and its workers ---------------------------------------------------------------

    def start(self) -> None:
        """Submit the job, start the workers, and return when they train.

        Raises :class:`StackError`.
        """
        jobs = Jobs(self._ledger)
        # The workers import the task, so the job needs no package.
        self.job = jobs.submit(self._workload.spec(), package="none").id
        # The controller repeats this in case the ledger restarts; here, once is enough.
        users = [ledger_user(self._secret, self.job)]
        AclUsers(self._ledger, LEDGER_SCRIPTS, linger_seconds=0.0).sync(users)
        for number in range(1, self._workload.workers + 1):
            self._start_worker(f"worker-{number}")
        seconds = READY_SECONDS + READY_SECONDS_PER_WORKER * self._workload.workers
        self.await_truth(lambda: jobs.get(self.job).facts is not None, seconds, "first snapshot")
        jobs.transition(
            self.job, JobState.RUNNING, [JobState.STARTING], why="the first snapshot is there"
        )
        self.await_truth(self._all_count, seconds, "worker")

    def _all_count(self) -> bool:
        return len(self.tallies) == len(self._workers) and all(
            tally.baseline for tally in self.tallies.values()
        )

    def _start_worker(self, name: str) -> None:
        argv = [sys.executable, "-m", "benchmarks.measure.worker", "--job", self.job,
                "--worker", name,
                "--tally", str(self._tally_path(name)),
                *(["--fresh"] if self._workload.fresh else [])]  # fmt: skip
        with self._home.open_log(name) as log:
            self._workers[name] = subprocess.Popen(
                argv,
                env={**os.environ, **self._environment(name)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    @property
    def _secret(self) -> str:
        """Secret from which the workers' users and passwords are derived."""
        return self._home.ensure_password("jobs")

    def _environment(self, worker: str) -> dict[str, str]:
        near = self._workload.near
        tensors = [files.nearest_url if near else files.url for files in self._nodes()]
        secrets = {
            "ledger_url": SecretStr(self._files("ledger").url),
            "tensors_url": SecretStr(" ".join(tensors)),
            "job_secret": SecretStr(self._secret),
        }
        settings = self._settings.model_copy(update=secrets)
        return {
            **worker_environment(settings, self.job, worker),
            "VCASGD_HEARTBEAT": str(settings.heartbeat),
        }

    def stop_workers(self) -> None:
        """Stop the workers, which push their last updates first."""
        for worker in self._workers.values():
            worker.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers.values():
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def _tally_path(self, name: str) -> Path:
        return self._folder / f"{name}.tally"

    # -- observation --------------------------------------------------------------------

    @property
    def tallies(self) -> dict[str, Tally]:
        """Tallies of the workers that have started to count."""
        for name in self._workers.keys() - self._tallies.keys():
            path = self._tally_path(name)
            if path.exists() and path.stat().st_size == Tally.SIZE:
                self._tallies[name] = Tally(path)
        return self._tallies

    @property
    def servers(self) -> dict[str, int]:
        """Process ID of each server."""
        return {name: part.pid for name, part in self._state.parts.items()}

    @property
    def workers(self) -> dict[str, int]:
        """Process ID of each worker."""
        return {name: worker.pid for name, worker in self._workers.items()}

    def snapshots(self) -> list[Snapshot]:
        """Return the current snapshot of each shard.

        Raises :class:`~vcasgd.errors.SnapshotMissing`.
        """
        facts = Jobs(self._ledger).get(self.job).facts
        assert facts is not None
        nodes = nodes_of(self._tensors, facts.store_nodes, facts.shards, self.job)
        return [
            SnapshotStore(node, TensorKeys(self.job, shard)).read()
            for shard, node in enumerate(nodes)
        ]

    def fetch_seconds(self) -> float:
        """Return the seconds of a fetch of the first shard into existing memory."""
        store = SnapshotStore(self._tensors[0], TensorKeys(self.job, 0))
        out = torch.zeros(store.read().meta.floats)
        began = time.monotonic()
        store.fetch(out)
        return time.monotonic() - began

    def beats(self) -> tuple[int, int]:
        """Return versions and publications of all shards, as of the servers' last heartbeats."""
        servers = Servers(self._ledger).all().values()
        versions, publications = (
            sum(server[field].get(self.job, 0) for server in servers)
            for field in ("versions", "publications")
        )
        return versions, publications

    def limit_memory(self, megabytes: int) -> None:
        """Limit the memory of each tensors server."""
        for tensors in self._tensors:
            tensors.config_set("maxmemory", f"{megabytes}mb")

    def server_facts(self) -> dict[str, Any]:
        """Return kind and version of the tensors servers, their highest peak of memory, and
        their total number of out-of-memory errors."""
        facts = [server_facts(tensors) for tensors in self._tensors]
        return {
            **facts[0],
            "store_nodes": len(facts),
            "tensors_peak_mb": max(each["tensors_peak_mb"] for each in facts),
            "refused_for_want_of_room": sum(each["refused_for_want_of_room"] for each in facts),
        }

    def await_truth(self, predicate: Callable[[], object], seconds: float, what: str) -> None:
        """Wait for a predicate.

        Raises :class:`StackError` after ``seconds``, or if a worker died.
        """
        deadline = time.monotonic() + seconds
        while not predicate():
            self.check()
            if time.monotonic() > deadline:
                raise StackError(f"no {what} within {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise :class:`StackError` if a worker died."""
        for name, worker in self._workers.items():
            if worker.poll() is not None:
                raise StackError(
                    f"{name} ended with status {worker.returncode}:\n{self._home.log_tail(name)}"
                )


def server_facts(tensors: RedisClient) -> dict[str, Any]:
    """Return the same facts for one tensors server."""
    info = tensors.info("everything")
    kind = str(info.get("server_name", "redis"))
    refused = info.get("errorstat_OOM", {})
    return {
        "server": kind,
        "server_version": str(info.get(f"{kind}_version", info["redis_version"])),
        "tensors_peak_mb": round(int(info["used_memory_peak"]) / 1e6, 1),
        "refused_for_want_of_room": int(refused.get("count", 0)) if refused else 0,
    }
