"""A real API process with a real ledger; tests write the data of the other processes."""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from httpx_sse import EventSource, ServerSentEvent
from safetensors.torch import save

from support.children import Child, ForkedProcess, Process
from support.harness import RedisServer
from support.ports import free_port, listens
from support.waiting import PATIENCE, await_truth
from vcasgd.api.app import create_app
from vcasgd.api.convert import job_view
from vcasgd.client import Client
from vcasgd.schemas.jobs import TrafficView
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases
from vcasgd.store.ledger.servers import Accounts, Servers

HEARTBEAT = 1.0
PACKAGE_LIMIT_MB = 1.0


@dataclass
class Api:
    """An API process that can be killed and restarted, with its ledger and storage.

    ``as_command``: start it with its command, which takes seconds.
    """

    home: Path
    ledger: RedisServer
    as_command: bool = False
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.log = self.home / "api.log"
        self.storage = Storage(f"file://{self.home}/storage")
        self.connection = self.ledger.client()
        self.jobs = Jobs(self.connection)
        self.control = Control(self.connection)
        self.servers = Servers(self.connection)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        return {
            "VCASGD_HOME": str(self.home),
            "VCASGD_API_URL": self.url,
            "VCASGD_TOKEN": self.token,
            "VCASGD_LEDGER_URL": self.ledger.files.url,
            "VCASGD_STORAGE_URL": self.storage.url,
            "VCASGD_HEARTBEAT": str(HEARTBEAT),
            "VCASGD_SECRETS_KEY": self.token * 2,
            "VCASGD_PACKAGE_LIMIT_MB": str(PACKAGE_LIMIT_MB),
            "OMP_NUM_THREADS": "1",
        }

    def launch(self, **env: str) -> Child:
        env = self.env | env
        if self.as_command:
            return Process([sys.executable, "-m", "vcasgd.api"], self.log, env)
        return ForkedProcess("vcasgd.api.__main__:main", [], self.log, env)

    def start(self, **env: str) -> Api:
        """Start the process, and return once it listens."""
        self.process = self.launch(**env)
        try:
            await_truth(self._listens)
        except BaseException:
            self.end()
            raise
        return self

    def _listens(self) -> bool:
        assert self.process.alive, self.log.read_text()
        return listens(self.port)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.end()

    def client(self, timeout: float = PATIENCE) -> Client:
        return Client(self.url, self.token, timeout=timeout)

    def http(self, token: str | None = None) -> httpx.Client:
        return self.visitor({"Authorization": f"Bearer {token or self.token}"})

    def visitor(self, headers: Mapping[str, str | bytes] | None = None) -> httpx.Client:
        """Return an HTTP client without a token."""
        return httpx.Client(
            base_url=f"{self.url}/api/v1/", headers=headers, timeout=PATIENCE, trust_env=False
        )

    # -- data of the other processes -------------------------------------------------------

    def submit(self, **fields: Any) -> str:
        return self.jobs.submit(spec(**fields), "0" * 64).id

    def start_job(self, job: str, samples: int = 100) -> None:
        """Report the data as a worker does, and start the job as the controller does."""
        lease = self.lease(job)
        facts = {"samples": samples, "validation_samples": 10, "layout": "[]", "order_digest": "d"}
        assert self.leases(job).report_facts(lease, facts)
        self.jobs.set_plan(job, self.jobs.get(job).points)
        assert self.jobs.transition(
            job, JobState.RUNNING, [JobState.STARTING], why="started", started_at=time.time()
        )

    def leases(self, job: str, worker: str = "w-1") -> Leases:
        return Leases(self.connection, job, worker, PATIENCE)

    def lease(self, job: str, worker: str = "w-1") -> Lease:
        return self.leases(job, worker).acquire()

    def account(self, job: str, version: int, finished: int, **totals: Any) -> None:
        accounts = Accounts(self.connection, job)
        assert accounts.account(1, version, finished, json.dumps(totals), [])

    def evaluate(
        self, job: str, epoch: int, metrics: dict[str, float], version: int = 0, at: float = 5.0
    ) -> None:
        """Finish an epoch, and report the evaluation of its model as a worker does."""
        version = version or epoch
        self.account(job, version, epoch)
        result = {"version": version, "metrics": metrics, "worker": "w-1", "seconds": 1.0, "at": at}
        assert self.leases(job).report_evaluation(self.lease(job), result)

    def finish(self, job: str, to: JobState = JobState.SUCCEEDED, **fields: Any) -> None:
        allowed = [state for state in JobState if not state.over]
        assert self.jobs.transition(job, to, allowed, why=f"it {to}", **fields)

    def store_checkpoint(self, job: str, version: int, size: int = 10) -> tuple[str, bytes]:
        data = save({"weight": torch.arange(size, dtype=torch.float32)})
        name = f"v{version:012d}-{hashlib.sha256(data).hexdigest()}.safetensors"
        self.storage.put(f"jobs/{job}/checkpoints/{name}", data)
        return name, data


def operations(http: httpx.Client) -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path, and description of all operations in the API's document."""
    document = http.get(http.base_url.join("/api/v1/openapi.json")).json()
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def filled(path: str) -> str:
    """Return the path of an operation with names of what doesn't exist."""
    names = {"job": "x-abc234", "digest": "0" * 64, "worker": "w-1", "name": "nobody",
             "machine": "join-x", "request": "0"}  # fmt: skip
    return path.format_map(names)


def messages_of(response: httpx.Response) -> Iterator[ServerSentEvent]:
    """Yield the messages of an event stream without keep-alive comments."""
    return (each for each in EventSource(response).iter_sse() if each.data)


@contextmanager
def running(home: Path, *, as_command: bool = False) -> Iterator[Api]:
    with ExitStack() as stack:
        ledger = RedisServer(home / "ledger", durable=True)
        stack.callback(ledger.end)
        api = Api(home, ledger, as_command).start()
        stack.callback(api.end)
        yield api


def spec(**fields: Any) -> JobSpec:
    wanted = {"name": "digits", "task": "train:Digits", "epochs": 2, "subtasks_per_epoch": 5}
    return JobSpec.parse({**wanted, **fields})


#: Content of the answer to a request for a job.
A_JOB = job_view(
    JobRecord("job", spec(), JobState.RUNNING, "0" * 64, created_at=1.0), TrafficView()
).model_dump(mode="json")


def zipped(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in (files or {"train.py": secrets.token_hex(8)}).items():
            archive.writestr(name, text)
    return buffer.getvalue()


@contextmanager
def serving(static: Path) -> Iterator[httpx.Client]:
    """Serve the API without a ledger, in this process, with the pages of a folder."""
    storage = Storage(static.as_uri())
    settings = Settings(token="x" * 16)
    app = create_app(settings, connect("redis://127.0.0.1:1/0"), storage, static)
    port = free_port()
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        await_truth(lambda: server.started)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE
        ) as http:
            yield http
    finally:
        server.should_exit = True
        thread.join(10)
