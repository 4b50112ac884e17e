"""The loops as plain processes on real servers, without Ray: what tests of the data path use."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import vcasgd.chaos
from vcasgd.errors import StoreError
from vcasgd.package import digest_of, pack
from vcasgd.runtime.checkpoints import Checkpoints
from vcasgd.runtime.storage import Storage
from vcasgd.spec import JobSpec
from vcasgd.store.connection import Client, connect
from vcasgd.store.embedded import ServerFiles, server_command, write_configuration
from vcasgd.store.jobs import Job, Jobs, State
from vcasgd.store.keys import TensorKeys
from vcasgd.store.snapshots import Snapshots

AUDIT_TASK = Path(vcasgd.chaos.__file__).parent / "task"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A child with a log; killed for certain at the end."""

    def __init__(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        with log.open("ab") as file:
            self.child = subprocess.Popen(
                argv,
                stdout=file,
                stderr=file,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def kill(self) -> None:
        """SIGKILL to all of it; returns when it is dead. Fails if it was dead already."""
        assert self.alive, "the fault did not fire: the process was already dead"
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(10)

    def terminate(self, timeout: float = 15) -> int:
        self.child.terminate()
        return self.child.wait(timeout)

    def end(self) -> None:
        if self.alive:
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(10)


class RedisServer:
    """A real server that can be killed and started again on the same port."""

    def __init__(self, directory: Path, *, durable: bool, binary: str | None = None) -> None:
        self.files = ServerFiles(directory, free_port(), secrets.token_hex(8))
        self.durable = durable
        self.binary = binary or os.environ.get("VCASGD_REDIS_SERVER")
        write_configuration(self.files, durable=durable)
        self.start()

    def start(self) -> None:
        log = self.files.directory / "server.log"
        self.process = Process(server_command(self.files, self.binary), log)
        client = self.client()
        deadline = time.monotonic() + 10
        while True:
            try:
                client.ping()
                return
            except StoreError:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)

    def client(self) -> Client:
        return connect(self.files.url)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.end()


class Plain:
    """Ledger, tensors, one parameter server and any number of workers."""

    def __init__(self, home: Path, *, heartbeat: float = 0.25, binary: str | None = None) -> None:
        self.home = home
        self.ledger = RedisServer(home / "ledger", durable=True, binary=binary)
        self.tensors = RedisServer(home / "tensors", durable=False, binary=binary)
        self.storage = Storage(f"file://{home}/storage")
        self.env = {
            "VCASGD_LEDGER_URL": self.ledger.files.url,
            "VCASGD_TENSORS_URL": self.tensors.files.url,
            "VCASGD_STORAGE_URL": self.storage.url,
            "VCASGD_CACHE_DIR": str(home / "cache"),
            "VCASGD_HEARTBEAT": str(heartbeat),
            "VCASGD_NODE": "node-0",
            "OMP_NUM_THREADS": "1",
        }
        self.jobs = Jobs(self.ledger.client())
        self.server: Process | None = None
        self.workers: dict[str, Process] = {}
        self._named = 0

    # -- processes ------------------------------------------------------------------------

    def start_server(self) -> Process:
        argv = [sys.executable, "-m", "vcasgd.runtime.server"]
        self.server = Process(argv, self.home / "server.log", self.env)
        return self.server

    def start_worker(self, job: str) -> str:
        self._named += 1
        name = f"worker-{self._named}"
        argv = [sys.executable, "-m", "vcasgd.runtime.worker", "--job", job, "--worker", name]
        self.workers[name] = Process(argv, self.home / f"{name}.log", self.env)
        return name

    def end(self) -> None:
        for process in (*self.workers.values(), self.server, self.tensors, self.ledger):
            if process is not None:
                process.end()

    # -- jobs -------------------------------------------------------------------------------

    def submit(self, working_dir: Path, **fields: Any) -> Job:
        spec = JobSpec.parse({"name": "job", "working_dir": str(working_dir), **fields})
        data = pack(working_dir, 10_000_000)
        self.storage.put(f"packages/{digest_of(data)}.zip", data)
        return self.jobs.submit(spec, digest_of(data))

    def submit_audit(
        self,
        *,
        samples: int = 1000,
        epochs: int = 3,
        subtasks: int = 10,
        push_every: int = 4,
        step_seconds: float = 0.0,
        **fields: Any,
    ) -> Job:
        return self.submit(
            AUDIT_TASK,
            task="audit:Audit",
            args={"samples": samples, "batch_size": 5, "step_seconds": step_seconds},
            epochs=epochs,
            subtasks_per_epoch=subtasks,
            push_every=push_every,
            update={"rule": "async-local-sgd", "eta": 1.0},
            **fields,
        )

    def play_controller(self, job: str) -> None:
        """The one transition that a run needs of a controller."""
        if self.jobs.get(job).facts is not None:
            self.jobs.transition(job, State.RUNNING, [State.STARTING], why="facts are known")

    def checkpoint(self, job: str) -> str:
        """Writes a checkpoint of the present snapshot, as the controller would."""
        from vcasgd.learning.vector import Layout

        facts = self.jobs.get(job).facts
        assert facts is not None
        snapshots = self.snapshots(job)
        snapshots.want_pin("test")
        deadline = time.monotonic() + 10
        while snapshots.pinned("test") is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        snapshot, floats = snapshots.fetch_pinned("test")
        layout = Layout.from_json(facts.layout)
        stored = Checkpoints(self.storage, job).write(snapshot, layout, floats)
        snapshots.unpin("test")
        return stored.name

    def snapshots(self, job: str) -> Snapshots:
        return Snapshots(self.tensors.client(), TensorKeys(job))

    def logs(self) -> str:
        return "\n".join(
            f"=== {path.name}\n{path.read_text()[-4000:]}" for path in self.home.glob("*.log")
        )
