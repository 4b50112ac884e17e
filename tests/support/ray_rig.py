"""A Ray cluster of real processes, and the controller's view of it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from support.children import die_with_parent
from support.fleet_records import PACKAGE, job_spec
from support.ports import free_port, listens
from support.processes import is_alive
from support.waiting import PATIENCE, await_truth
from vcasgd.cluster.commands import node_command
from vcasgd.cluster.driver import Cluster
from vcasgd.cluster.head import head_command
from vcasgd.controller.fleet.workplaces import Workplaces
from vcasgd.errors import ClusterError
from vcasgd.fleet.notices import Notice
from vcasgd.settings import Settings
from vcasgd.store.connection import connect
from vcasgd.store.embedded import ServerFiles, server_command, write_configuration
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.worker_names import worker_name

HEARTBEAT = 1.0
HOST = "127.0.0.1"
NAMESPACE = "test"
TOKEN = "a-token-of-the-tests-that-is-long-enough"
PASSWORD = "a-secret-password"


class Rig:
    """A ledger, a head, and nodes, each in its own session as on its own machine."""

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        self.folder = folder
        self.tls = tls
        self.port = free_port()
        self.address = f"{HOST}:{self.port}"
        self.files = ServerFiles(folder / "ledger", free_port(), PASSWORD)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ledger = connect(self.files.url)
        self.jobs = Jobs(self.ledger)
        self.job = ""

    def start(self, name: str, argv: tuple[str, ...], env: dict[str, str] | None = None) -> None:
        tests = Path(__file__).parents[1]
        paths = os.pathsep.join(map(str, [tests, tests.parent]))
        with (self.folder / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                argv,
                env={**os.environ, "PYTHONPATH": paths, **(env or {})},
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def start_ledger(self) -> None:
        write_configuration(self.files, durable=True)
        self.start("ledger", tuple(server_command(self.files)))
        await_truth(lambda: listens(self.files.port))

    def submit(self) -> None:
        """Submit a job whose workers wait for another one, which prepares its model forever."""
        self.job = self.jobs.submit(job_spec(), PACKAGE).id
        assert isinstance(Leases(self.ledger, self.job, "other", 86_400.0).acquire(), Lease)

    def start_head(self) -> None:
        command = head_command(
            Settings(cluster=NAMESPACE, heartbeat=HEARTBEAT, ray_tls=self.tls),
            address=self.address,
            ledger_url=self.files.url,
            temp_dir=self.folder / "h",
            token=TOKEN,
        )
        assert command is not None
        self.start("head", command.argv, command.env)

    def start_node(self, machine_id: str, address: str | None = None) -> None:
        """Start a machine that finds the head at ``address``, if not at its own."""
        command = node_command(
            address=address or self.address,
            machine_id=machine_id,
            cpus=1,
            temp_dir=self.folder / machine_id,
            heartbeat=HEARTBEAT,
            token=TOKEN,
            tls=self.tls,
        )
        env = {
            **command.env,
            "VCASGD_HEARTBEAT": str(HEARTBEAT),
            "VCASGD_STORAGE_URL": f"file://{self.folder}/storage",
            "VCASGD_NOTICE_FILE": str(self.notice_file(machine_id)),
        }
        self.start(machine_id, command.argv, env)

    def notice_file(self, machine_id: str) -> Path:
        return self.folder / f"{machine_id}.notice"

    def kill(self, *names: str) -> None:
        """As a machine dies: everything in the session, at once, without a word."""
        for name in names:
            process = self.processes.pop(name)
            kill_session(process.pid)
            process.wait(PATIENCE)

    def close(self) -> None:
        self.kill(*self.processes)
        shutil.rmtree(self.folder, ignore_errors=True)

    def worker(self, machine_id: str) -> str:
        """Return the name of the worker of a machine."""
        return worker_name(machine_id, self.job)

    def beat(self, machine_id: str) -> Heartbeat | None:
        """Return the last heartbeat of the worker of a machine."""
        return self.jobs.workers.heartbeat(self.job, self.worker(machine_id))

    def pid(self, machine_id: str) -> int:
        """Return the process of the worker of a machine."""
        beat = self.beat(machine_id)
        assert beat is not None
        assert beat.pid is not None
        return beat.pid


@dataclass(frozen=True)
class Seen:
    """Observation of a round of the controller: workers are alive, or have ended."""

    machines: frozenset[str]
    workers: dict[str, bool]
    notices: dict[str, Notice]


class Driver:
    """The controller's :class:`Workplaces` in a process of their own, because Ray can end that."""

    def __init__(self, rig: Rig) -> None:
        context = multiprocessing.get_context("spawn")
        self._rig = rig
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=drive, args=(rig.address, rig.tls, rig.files.url, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        self.connection.send((method, arguments))
        assert self.connection.poll(PATIENCE), f"{method} hangs"
        answer = self.connection.recv()
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    def see(self) -> Seen:
        seen = self._call("see")
        assert isinstance(seen, Seen)
        return seen

    def has(self, machine_id: str) -> bool:
        return machine_id in self.see().machines

    def state(self, machine_id: str) -> bool | None:
        """Return True if the worker of a machine is alive, and None if there is none."""
        return self.see().workers.get(self._rig.worker(machine_id))

    def start(self, machine_id: str) -> None:
        """Start a worker of the job on a machine."""
        url = self._rig.files.url
        env = {"VCASGD_LEDGER_URL": url, "VCASGD_TENSORS_URL": url}
        self._call("start", {self._rig.worker(machine_id): env})

    def stop(self, machine_id: str) -> None:
        """Kill the worker of a machine."""
        self._call("stop", self._rig.worker(machine_id))

    def end(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)
        self.connection.close()


def drive(address: str, tls: bool, ledger_url: str, connection: Connection) -> None:
    places = Workplaces(
        lambda: Cluster.connect(address, NAMESPACE, PATIENCE, TOKEN, tls=tls),
        Settings(heartbeat=HEARTBEAT),
        connect(ledger_url),
    )

    def see() -> Seen:
        places.refresh()
        workers = {view.name: view.alive for view in places.workers}
        return Seen(places.nodes, workers, places.notices)

    calls: dict[str, Callable[..., Any]] = {
        "see": see, "start": places.start, "stop": places.stop,
    }  # fmt: skip
    with suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            try:
                connection.send(calls[method](*arguments))
            except ClusterError as error:
                connection.send(error)


def session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_session(leader: int) -> None:
    while processes := session(leader):
        for process in processes:
            with suppress(psutil.Error):
                process.kill()


def start_worker(rig: Rig, driver: Driver, machine: str) -> int:
    """Start a worker on a machine, and return its process."""
    await_truth(lambda: driver.has(machine))
    rig.jobs.workers.remove(rig.job, rig.worker(machine))
    driver.start(machine)
    await_truth(lambda: driver.state(machine) and rig.beat(machine))
    return rig.pid(machine)


def assert_works(rig: Rig, machine: str, pid: int) -> None:
    """Assert that the worker of a machine is this process."""
    began = time.time()
    await_truth(lambda: (b := rig.beat(machine)) is not None and (b.at or 0.0) > began)
    assert rig.pid(machine) == pid
    assert is_alive(pid)


@contextmanager
def running_rig(*, tls: bool = False) -> Iterator[Rig]:
    """Run a ledger with a job, and the head."""
    rig = Rig(Path(tempfile.mkdtemp(prefix="v", dir="/tmp")), tls=tls)
    try:
        rig.start_ledger()
        rig.submit()
        rig.start_head()
        yield rig
    finally:
        rig.close()
