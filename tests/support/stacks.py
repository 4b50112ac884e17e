"""Stacks of real processes in a home of their own, and programs that stand in for parts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil

from support.processes import processes_of
from support.waiting import await_truth
from vcasgd.fleet.providers.local.processes import kill_all
from vcasgd.settings import Settings
from vcasgd.stack import PartState, StackHome, StackState, down, is_running, up
from vcasgd.stack.parts import mark
from vcasgd.store.connection import RedisClient, connect

#: Parts that start within a second and suffice for most tests.
REDIS = ("ledger", "tensors")

#: Program that claims to be Redis 6; vcasgd/store/connection.py sends the queries.
OLD_SERVER = f"""\
#!{sys.executable}
import re, socketserver, sys

class Redis6(socketserver.StreamRequestHandler):
    def handle(self):
        while count := self.rfile.readline():
            words = [self.word() for _ in range(int(count[1:]))]
            body = b"redis_version:6.2.14\\r\\n"
            info = b"$%d\\r\\n%s\\r\\n" % (len(body), body)
            self.wfile.write(info if words[0].upper() == b"INFO" else b"+OK\\r\\n")

    def word(self):
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:size]

port = int(re.search(r"^port (\\d+)$", open(sys.argv[1]).read(), re.M)[1])
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("127.0.0.1", port), Redis6).serve_forever()
"""

#: Starts a foreground stack, reports it, and waits to be killed.
FOREGROUND = """
import sys
from pathlib import Path
from vcasgd.settings import Settings
from vcasgd.stack import ForegroundStack
stack = ForegroundStack(Settings(home=Path(sys.argv[1]), api_port=0), ("ledger", "tensors"))
stack.await_ready()
print("up", flush=True)
sys.stdin.read()
"""


class StackHarness:
    """Home of a stack, with helpers for tests."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def settings(self, **options: object) -> Settings:
        return Settings.model_validate({"home": self.home, "api_port": 0, **options})

    def up(self, names: tuple[str, ...] = REDIS, **options: object) -> StackState:
        return up(self.settings(**options), names=names)

    def down(self) -> bool:
        return down(self.settings())

    def state(self) -> StackState:
        return StackState.read(self.home)

    def part(self, name: str) -> PartState:
        return self.state().parts[name]

    def kill(self, name: str) -> PartState:
        """Kill a part with SIGKILL, and return its state after the restart."""
        before = self.part(name)
        os.kill(before.pid, signal.SIGKILL)
        await_truth(lambda: self.part(name).restarts > before.restarts)
        await_truth(lambda: self.part(name).ready)
        return self.part(name)

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.home)

    def await_end(self) -> None:
        await_truth(lambda: not self.processes() and not is_running(self.home))

    def ledger(self) -> RedisClient:
        return connect(server_url(StackHome(self.home), "ledger"))


def server_url(home: StackHome, name: str) -> str:
    port = StackState.read(home.path).ports[name]
    return f"redis://:{home.ensure_password(name)}@127.0.0.1:{port}/0"


def kill_part(home: StackHome, name: str) -> None:
    """Kill a part of a stack and all of its helpers with SIGKILL. Fails if it was not alive."""
    process = StackState.read(home.path).parts[name].process
    assert process.alive(), f"the fault did not fire: {name} was dead already"
    assert kill_all(mark(home, name), process)
    assert not process.alive()


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)
