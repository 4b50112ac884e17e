"""A Ray cluster of real processes: a ledger, a head, machines, and drivers."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from support.harness import die_with_parent
from support.ports import free_port
from support.waiting import PATIENCE, await_truth
from vcasgd.cluster import ActorState, Cluster, head_command, node_command
from vcasgd.errors import ClusterError
from vcasgd.store.embedded.server import ServerFiles, server_command, write_configuration

HEARTBEAT = 1.0
HOST = "127.0.0.1"
NAMESPACE = "test"
TOKEN = "a-token-of-the-tests-that-is-long-enough"
PASSWORD = "a-secret-password"
#: A module that nothing else imports.
PRELOADED = "wave"
COUNT = "support.ray_rig:count"
WRITE_MODULES = "support.ray_rig:write_modules"


def count(path: str, until: int = sys.maxsize, exit_code: int = 0) -> None:
    """Worker entry point that counts into a file, ten times per second."""
    for number in range(until):
        Path(path + ".new").write_text(f"{os.getpid()} {number}")
        Path(path + ".new").replace(path)
        time.sleep(0.1)
    raise SystemExit(exit_code)


def write_modules(path: str) -> None:
    """Worker entry point that writes the names of all modules that are imported."""
    Path(path + ".new").write_text(" ".join(sys.modules))
    Path(path + ".new").replace(path)


class Rig:
    """A ledger, a head, and nodes, each in its own session as on its own machine."""

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        self.folder = folder
        self.tls = tls
        self.port = free_port()
        self.address = f"{HOST}:{self.port}"
        self.files = ServerFiles(folder / "ledger", free_port(), PASSWORD)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

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

    def start_head(self) -> None:
        command = head_command(
            host=HOST,
            port=self.port,
            ledger_address=f"{HOST}:{self.files.port}",
            ledger_password=PASSWORD,
            namespace=NAMESPACE,
            temp_dir=self.folder / "h",
            heartbeat=HEARTBEAT,
            token=TOKEN,
            tls=self.tls,
        )
        self.start("head", command.argv, command.env)

    def start_node(
        self, machine_id: str, address: str | None = None, *, metadata: str | None = None
    ) -> None:
        """Start a machine that finds the head at ``address``, if not at its own.

        ``metadata``: URL of its metadata server, if it is one of AWS.
        """
        command = node_command(
            address=address or self.address,
            machine_id=machine_id,
            cpus=1,
            temp_dir=self.folder / machine_id,
            heartbeat=HEARTBEAT,
            labels={"pool": "p"},
            preload=[PRELOADED],
            token=TOKEN,
            tls=self.tls,
        )
        argv, env = command.argv, command.env
        if metadata is not None:
            argv = (sys.executable, "-m", "vcasgd.cluster.node", *argv)
            env |= {
                "VCASGD_METADATA_KIND": "aws",
                "VCASGD_METADATA_URL": metadata,
                "VCASGD_STORAGE_URL": f"file://{self.folder}/storage",
                "VCASGD_ORPHAN_SECONDS": "86400",
            }
        self.start(machine_id, argv, env)

    def kill(self, *names: str) -> None:
        """As a machine dies: everything in the session, at once, without a word."""
        for name in names:
            process = self.processes.pop(name)
            kill_session(process.pid)
            process.wait(PATIENCE)

    def close(self) -> None:
        self.kill(*self.processes)
        shutil.rmtree(self.folder, ignore_errors=True)

    def counter(self, name: str) -> tuple[int, int] | None:
        """Process and count of the worker that counts under this name."""
        with suppress(OSError):
            pid, number = (self.folder / name).read_text().split()
            return int(pid), int(number)
        return None


class Driver:
    """A :class:`Cluster` in its own process, because Ray can end that."""

    def __init__(self, rig: Rig) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=drive, args=(rig.address, rig.tls, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.connection.send((method, arguments))
            assert self.connection.poll(PATIENCE), f"{method} hangs"
            answer = self.connection.recv()
            if isinstance(answer, ClusterError):
                raise answer
            return answer

        return call

    def living_machines(self) -> set[str]:
        return {node.machine_id for node in self.nodes() if node.alive and node.machine_id}

    def finds_head(self) -> bool:
        try:
            return bool(self.nodes())
        except ClusterError:
            return False

    def state(self, worker: str) -> ActorState | None:
        found = self.workers().get(worker)
        return found and found.state

    def end(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)
        self.connection.close()


def drive(address: str, tls: bool, connection: Connection) -> None:
    cluster = Cluster.connect(address, NAMESPACE, PATIENCE, TOKEN, tls=tls)
    with suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            try:
                connection.send(getattr(cluster, method)(*arguments))
            except ClusterError as error:
                connection.send(error)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


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


def alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def start_counting(rig: Rig, driver: Driver, machine: str, worker: str, **arguments: int) -> None:
    await_truth(lambda: machine in driver.living_machines())
    arguments_ = {"path": str(rig.folder / worker), **arguments}
    driver.start_worker(machine, worker, COUNT, arguments_, {})
    await_truth(lambda: rig.counter(worker))


def assert_counts_on(rig: Rig, worker: str, pid: int, since: int) -> None:
    await_truth(lambda: (rig.counter(worker) or (0, 0))[1] > since)
    assert (rig.counter(worker) or (0, 0))[0] == pid
