"""The processes of the data path on real servers, without Ray and machines."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import SecretStr
from torch import Tensor

import vcasgd.chaos
from support.children import Child, ForkedProcess, Process
from support.ports import free_port
from support.waiting import PATIENCE, await_truth
from vcasgd.controller.jobs.loop import JobLoop
from vcasgd.controller.leadership import Leadership
from vcasgd.errors import StoreError
from vcasgd.fleet.notices import NOTICE_FILE_VARIABLE, NoticeKind, write_notice
from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import Cut
from vcasgd.logging import configure_logging
from vcasgd.parameter_server.main import main as run_parameter_server
from vcasgd.settings import Settings, load_settings
from vcasgd.spec.job import JobSpec
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.storage.objects import ObjectStream, Storage
from vcasgd.store.admission import worker_environment
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.embedded import ServerFiles, server_command, write_configuration
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Servers
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.store.tensors.sharded import ShardedSnapshots
from vcasgd.store.tensors.snapshot_index import nodes_of
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.task.package import digest_of, pack

AUDIT_TASK = Path(vcasgd.chaos.__file__).parent / "task"

#: Seconds; long enough that a worker keeps its lease on a busy machine.
HEARTBEAT = 1.0


def run_job_loop() -> None:
    """Run the part of the controller that needs no machines."""
    configure_logging("job-loop")
    settings = load_settings()
    ledger = connect(settings.required("ledger_url"), over_limit=True)
    nodes = [connect(url) for url in settings.tensors_urls()]
    leadership = Leadership(Control(ledger), settings)
    leadership.start()
    JobLoop(settings, ledger, nodes, leadership, WorkerBeats(ledger)).run()


def run_server_with_a_stalled_storage() -> int:
    """Run a parameter server that waits for checkpoints of the job in ``stalled``, a file."""
    stalled, stream = Path(os.environ["VCASGD_CACHE_DIR"]).with_name("stalled"), Storage.stream

    def stall(storage: Storage, name: str) -> ObjectStream:
        if stalled.exists() and stalled.read_text() in name:
            stalled.with_name("stalls").touch()
            while stalled.exists():
                time.sleep(0.05)
        return stream(storage, name)

    Storage.stream = stall
    return run_parameter_server()


class RedisServer:
    """A real server that can be killed and restarted on the same port."""

    def __init__(
        self,
        directory: Path,
        *,
        durable: bool,
        binary: str | None = None,
        more: Sequence[str] = (),
        password: str | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.env = env
        self.files = ServerFiles(directory, free_port(), password or secrets.token_hex(8))
        self.durable = durable
        self.binary = binary or os.environ.get("VCASGD_REDIS_SERVER")
        self.configure(more)
        #: Reconnects after a restart.
        self.connection = self.client()
        self.start()

    def configure(self, more: Sequence[str]) -> None:
        """Write the configuration of its next start, with ``more`` lines."""
        write_configuration(self.files, durable=self.durable, more=more)

    def start(self) -> None:
        log = self.files.directory / "server.log"
        self.process = Process(server_command(self.files, self.binary), log, self.env)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.connection.ping()
                return
            except StoreError:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)

    @property
    def url(self) -> str:
        return self.files.url

    def client(self) -> RedisClient:
        return connect(self.url)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.connection.close()
        self.process.end()


def worker_credentials(
    ledger: str, tensors: str, secret: str, job: str, worker: str
) -> dict[str, str]:
    """Return the environment of a worker of a platform with these URLs and this job secret."""
    settings = Settings(
        ledger_url=SecretStr(ledger),
        tensors_url=SecretStr(tensors),
        job_secret=SecretStr(secret),
    )
    return worker_environment(settings, job, worker)


class Store(Protocol):
    """A server, or a primary with its replicas."""

    @property
    def url(self) -> str: ...

    @property
    def connection(self) -> RedisClient: ...

    def end(self) -> None: ...


class Harness:
    """Ledger, store nodes (usually one), any number of workers, and a job loop."""

    def __init__(
        self,
        home: Path,
        *,
        heartbeat: float = HEARTBEAT,
        binary: str | None = None,
        nodes: int = 1,
        ledger: Store | None = None,
        tensors: Sequence[Store] = (),
    ) -> None:
        self.home = home
        self.ledger = ledger or RedisServer(home / "ledger", durable=True, binary=binary)
        #: The tensors server of each store node.
        self.nodes = [*tensors] or [
            RedisServer(home / f"tensors-{node}", durable=False, binary=binary)
            for node in range(nodes)
        ]
        self.tensors = self.nodes[0]
        #: The parameter server that was last started on each store node.
        self.servers: dict[int, Child] = {}
        self.storage = Storage(f"file://{home}/storage")
        self.env = {
            "VCASGD_LEDGER_URL": self.ledger.url,
            "VCASGD_TENSORS_URL": " ".join(node.url for node in self.nodes),
            "VCASGD_STORAGE_URL": self.storage.url,
            "VCASGD_CACHE_DIR": str(home / "cache"),
            "VCASGD_HEARTBEAT": str(heartbeat),
        }
        self.settings = Settings(heartbeat=heartbeat)
        self.jobs = Jobs(self.ledger.connection)
        self.workers: dict[str, Child] = {}
        self._children: list[Child] = []

    # -- processes ------------------------------------------------------------------------

    @property
    def server(self) -> Child:
        return self.servers[0]

    def start_server(
        self, node: int = 0, *, entry: str = "vcasgd.parameter_server.main:main", **options: Any
    ) -> Child:
        """Start a parameter server; ``options`` as those of :meth:`_start`."""
        self.servers[node] = self._start(
            entry,
            [],
            f"server-{node}",
            {"VCASGD_NODE": str(node)},
            **options,
        )
        return self.servers[node]

    def start_servers(self) -> None:
        for node in range(len(self.nodes)):
            self.start_server(node)

    def start_job_loop(self, **options: Any) -> Child:
        """Start the part of the controller that needs no machines."""
        return self._start("support.harness:run_job_loop", [], "job-loop", **options)

    def start_worker(
        self,
        job: str,
        *,
        name: str | None = None,
        entry: str = "vcasgd.worker.main:main",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> str:
        """Start a worker; ``options`` as those of :meth:`_start`."""
        name = name or self._new_name()
        argv = ["--job", job, "--worker", name]
        env = {**self.credentials(job, name), **(env or {})}
        self.workers[name] = self._start(entry, argv, name, env, **options)
        return name

    def bind_workers(self, secret: str) -> None:
        """Give workers their own ACL users, which job loop and parameter server create."""
        self.env["VCASGD_JOB_SECRET"] = secret

    def credentials(self, job: str, worker: str) -> dict[str, str]:
        if "VCASGD_JOB_SECRET" not in self.env:
            return {}
        names = ("VCASGD_LEDGER_URL", "VCASGD_TENSORS_URL", "VCASGD_JOB_SECRET")
        platform = [self.env[name] for name in names]
        return {**worker_credentials(*platform, job, worker), "VCASGD_JOB_SECRET": ""}

    def start_workers(self, job: str, number: int) -> list[str]:
        return [self.start_worker(job) for _ in range(number)]

    def start_noticing_worker(self, job: str) -> str:
        """Start a worker that gets notices by :meth:`notify`."""
        name = self._new_name()
        env = {NOTICE_FILE_VARIABLE: str(self.home / f"{name}.notice")}
        return self.start_worker(job, name=name, env=env)

    def notify(self, worker: str, kind: NoticeKind, seconds: float | None = None) -> None:
        """Give notice to a worker, as its machine does."""
        write_notice(self.home / f"{worker}.notice", kind, seconds)

    def _new_name(self) -> str:
        return f"worker-{len(self.workers) + 1}"

    def _start(
        self,
        entry: str,
        argv: list[str],
        log: str,
        env: Mapping[str, str] | None = None,
        *,
        under: Sequence[str] = (),
        fresh_env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start ``module:function``.

        With ``under``, a command that runs another one, or ``fresh_env``, variables that must exist
        when the program starts, it is a program of its own instead of a fork.
        """
        env, path = {**self.env, **(env or {})}, self.home / f"{log}.log"
        if under or fresh_env:
            module, _, function = entry.partition(":")
            code = f"import sys; from {module} import {function} as run; sys.exit(run())"
            program = [*under, sys.executable, "-c", code, *argv]
            env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(fresh_env or {})}
            process: Child = Process(program, path, env)
        else:
            process = ForkedProcess(entry, argv, path, env)
        self._children.append(process)
        return process

    def end(self) -> None:
        for process in (*self._children, *self.nodes, self.ledger):
            process.end()

    # -- jobs -------------------------------------------------------------------------------

    def submit(self, working_dir: Path, **fields: Any) -> str:
        spec = JobSpec.parse({"name": "job", "working_dir": str(working_dir), **fields})
        data = pack(working_dir, 10_000_000)
        self.storage.put(f"packages/{digest_of(data)}.zip", data)
        return self.jobs.submit(spec, digest_of(data)).id

    def submit_audit(
        self,
        *,
        samples: int = 1000,
        epochs: int | None = None,
        subtasks: int | None = 10,
        push_every: int | str | None = 4,
        step_seconds: float = 0.0,
        working_dir: Path = AUDIT_TASK,
        task: str = "audit:Audit",
        args: Mapping[str, Any] | None = None,
        update: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        return self.submit(
            working_dir,
            task=task,
            args={
                "samples": samples,
                "batch_size": 5,
                "step_seconds": step_seconds,
                "copies": len(self.nodes),
                **(args or {}),
            },
            **({} if {"max_samples", "max_steps"} & fields.keys() else {"epochs": epochs or 3}),
            **({"subtasks_per_epoch": subtasks} if subtasks else {}),
            push_every=push_every,
            update=dict(update or {"rule": "async-local-sgd", "eta": 1.0}),
            **fields,
        )

    def start_job_when_ready(self, job: str) -> None:
        """Make the only transition that a run needs from a controller, as soon as possible."""
        await_truth(lambda: self.jobs.get(job).facts)
        self.jobs.set_plan(job, self.jobs.get(job).points)
        self.jobs.transition(job, JobState.RUNNING, [JobState.STARTING], why="facts are known")

    def checkpoint(self, job: str) -> str:
        """Write a checkpoint of the present snapshot, as the controller does."""
        snapshots = self.sharded(job)
        snapshots.request_pin("test")
        whole = await_truth(lambda: snapshots.pinned("test"))
        floats = partial(snapshots.pieces, whole)
        state = partial(snapshots.state_pieces, whole) if whole[-1].meta.rule_state else None
        stored = self.checkpoints(job).write(whole, self.layout(job), floats, state)
        snapshots.unpin("test")
        return stored.name

    def damage_checkpoint(self, job: str, name: str) -> None:
        path = f"jobs/{job}/checkpoints/{name}"
        data = bytearray(self.storage.get(path))
        data[len(data) // 2] ^= 1
        self.storage.put(path, bytes(data))

    def checkpoints(self, job: str) -> ModelCheckpoints:
        return ModelCheckpoints(self.storage, job)

    def snapshots(self, job: str, shard: int = 0) -> SnapshotStore:
        return SnapshotStore(self.nodes[shard].connection, TensorKeys(job, shard))

    def sharded(self, job: str) -> ShardedSnapshots:
        facts, cut = self.jobs.get(job).facts, self.cut(job)
        nodes = [node.connection for node in self.nodes]
        return ShardedSnapshots(nodes_of(nodes, facts.store_nodes, cut.shards, job), job, cut)

    def cut(self, job: str) -> Cut:
        layout = self.layout(job)
        return Cut(layout.floats, layout.parameters, self.jobs.get(job).facts.shards)

    def layout(self, job: str) -> Layout:
        return Layout.from_json(self.jobs.get(job).facts.layout)

    # -- observations -----------------------------------------------------------------------

    def vector(self, job: str) -> Tensor:
        """Return the present parameters of all shards."""
        out = torch.empty(self.layout(job).floats)
        for part in self.cut(job).parts:
            self.snapshots(job, part.shard).fetch(part.of(out))
        return out

    def applied(self, job: str, shard: int = 0) -> int:
        """Return the samples in a shard's present snapshot, over all epochs; 0 without one."""
        try:
            return self.snapshots(job, shard).read().meta.totals.samples
        except StoreError:
            return 0

    def server_heartbeat_at(self) -> float:
        return float(Servers(self.ledger.connection).all()["node-0"]["at"])

    def events(self, job: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.jobs.events(job) if event["kind"] == kind]

    def logs(self) -> str:
        return "\n".join(
            f"=== {path.name}\n{path.read_text()[-4000:]}" for path in self.home.glob("*.log")
        )
