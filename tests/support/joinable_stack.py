"""A stack that machines can join, and agents that join it: real processes, no Ray."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from support.children import Process
from support.namespaces import OnePort
from support.ports import free_port
from support.sandboxes import sandbox_options
from vcasgd.chaos.audited_job import own_settings
from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.spec.access import Scope
from vcasgd.stack import StackHome, StackState, running
from vcasgd.stack.control import MODULES
from vcasgd.stack.layout import GATEWAY

HEARTBEAT = 0.5
POOLS = "pools: [{name: volunteers, provider: join}]\n"
#: Libraries that a machine needs only if it runs a stack.
SERVER_LIBRARIES = (*MODULES, "boto3")


@dataclass
class VolunteerMachine:
    """An agent, its output, and its folder for temporary files."""

    process: Process
    log: Path
    temporary: Path

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if _is_worker(each)]

    def name(self) -> str:
        return self.log.read_text().partition("joined as ")[2].partition(",")[0]

    def left_nothing(self) -> bool:
        return not list(self.temporary.iterdir())


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "vcasgd.worker.main" in process.cmdline() and process.name() != "bwrap"
    except psutil.Error:
        # It has ended.
        return False


@dataclass
class Volunteers:
    """A stack that machines can join, and the machines of a test."""

    settings: Settings
    state: StackState
    client: Client

    @property
    def port(self) -> int:
        return self.state.ports[GATEWAY]

    def token(self, name: str, **options: Any) -> str:
        return self.client.create_token(name, Scope.JOIN, pool="volunteers", **options).token

    @contextmanager
    def machine(
        self, token: str, *options: str, place: OnePort | None = None, programs: Path | None = None
    ) -> Iterator[VolunteerMachine]:
        """Run an agent in an environment of its own, without the libraries of servers.

        It finds ``programs`` before those of the system.
        """
        # Not in the test's folder, whose path may be too long for sockets.
        with tempfile.TemporaryDirectory(prefix="vcasgd-machine-") as folder:
            home = Path(folder)
            blocked, temporary = home / "blocked", home / "tmp"
            temporary.mkdir(parents=True)
            for library in SERVER_LIBRARIES:
                (blocked / library).mkdir(parents=True)
                (blocked / library / "__init__.py").write_text(
                    "raise ImportError('not installed')\n"
                )
            port = place.port if place else self.port
            argv = [
                sys.executable,
                "-m",
                "vcasgd.cli",
                "join",
                f"https://127.0.0.1:{port}",
                *sandbox_options(),
                *options,
            ]
            env = {
                "PYTHONPATH": os.pathsep.join([str(blocked), *sys.path]),
                "TMPDIR": str(temporary),
                "VCASGD_TOKEN": token,
                "VCASGD_HOME": str(home),
                "PATH": os.pathsep.join(
                    [*([str(programs)] if programs else []), os.environ["PATH"]]
                ),
            }
            log = home / "agent.log"
            process = Process(place.command(argv) if place else argv, log, env)
            try:
                yield VolunteerMachine(process, log, temporary)
            finally:
                process.end()
                sys.stdout.write(log.read_text())


@contextmanager
def joinable_stack(folder: Path) -> Iterator[Volunteers]:
    pools = folder / "pools.yaml"
    pools.write_text(POOLS)
    settings = own_settings(
        folder / "home", heartbeat=HEARTBEAT, pools=pools, join_port=0, join_host="127.0.0.1"
    )
    with (
        running(settings) as state,
        Client(state.api_url, StackHome(settings.home).token()) as client,
    ):
        yield Volunteers(settings, state, client)


@contextmanager
def launching_stack(
    folder: Path, pool: Mapping[str, Any]
) -> Iterator[tuple[Settings, Client, str]]:
    """Run a stack that launches machines in its only pool; also yield the token they join with."""
    pools, port, name = folder / "pools.yaml", free_port(), pool["name"]
    pools.write_text(yaml.safe_dump({"pools": [dict(pool)]}))
    settings = own_settings(
        folder / "home",
        heartbeat=HEARTBEAT,
        idle_seconds=3.0,
        pools=pools,
        join_port=port,
        join_host="127.0.0.1",
        join_url=f"https://127.0.0.1:{port}",
    )
    with running(settings) as state:
        assert "head" not in state.parts, "there is no Ray"
        with Client(state.api_url, StackHome(settings.home).token()) as client:
            yield settings, client, client.create_token(name, Scope.JOIN, pool=name).token
