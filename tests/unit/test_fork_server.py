"""Commands in forks of a process that has imported their modules."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import PATIENCE

from vcasgd import fork_client

Eventually = Callable[..., Any]

#: A module that nothing else imports.
MODULE = "wave"
#: Signals by which a server limits its resources, and lifts the limit again.
NO_PROCESSES, NO_FILES = signal.SIGUSR1, signal.SIGUSR2
#: The kernel doesn't limit root's processes, so it becomes another user, who can read all files.
SERVER = f"""
import ctypes, os, resource, signal, sys
from pathlib import Path
from vcasgd.fork_server import ForkServer, listen, preload
listener = listen(Path(sys.argv[1]))
preload(["{MODULE}"])
if os.getuid() == 0:
    libc, files = ctypes.CDLL(None), 1 << 1 | 1 << 2
    libc.prctl(8, 1, 0, 0, 0)
    os.setuid(54321)
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(files, files))
def toggle(what, limit):
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (hard if soft == limit else limit, hard))
signal.signal({NO_PROCESSES:d}, lambda *_: toggle(resource.RLIMIT_NPROC, 0))
signal.signal({NO_FILES:d}, lambda *_: toggle(resource.RLIMIT_NOFILE, 3))
sys.stderr.write("ready\\n")
ForkServer(listener, request_seconds=float(sys.argv[2])).serve()
"""
COMMAND = f"""
import os, random, sys
print("{MODULE}" in sys.modules, sys.argv[1:], os.environ["GREETING"], os.getcwd(), os.getpid())
print(random.random(), file=sys.stderr)
exec(sys.stdin.read())
"""


class Forks:
    """A server of forks, and clients of it."""

    def __init__(self, folder: Path, request_seconds: float = PATIENCE) -> None:
        self.folder, self.path = folder, folder / "s"
        self.command = folder / "command.py"
        self.command.write_text(COMMAND)
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(self.path), str(request_seconds)], stderr=log
            )

    def is_ready(self) -> bool:
        """Return True once signals limit the server instead of ending it."""
        return "ready" in self.log.read_text()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", fork_client.__file__, self.path, self.command, *arguments],
            env={**os.environ, "GREETING": "hello"},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str) -> tuple[str, str, int]:
        client = self.start("a", "b")
        output, errors = client.communicate(code, PATIENCE)
        return output, errors, client.returncode

    def hanging(self) -> tuple[subprocess.Popen[str], psutil.Process]:
        """Return a client, and the process of its command."""
        client = self.start()
        assert client.stdout is not None
        return client, psutil.Process(int(client.stdout.readline().split()[-1]))

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(PATIENCE)
        client.connect(str(self.path))
        return client

    @contextmanager
    def limited(self, by: signal.Signals) -> Iterator[None]:
        """Limit a resource of the server."""
        self.server.send_signal(by)
        yield
        self.server.send_signal(by)

    def end(self) -> None:
        self.server.kill()
        self.server.wait(PATIENCE)


@pytest.fixture
def forks(tmp_path: Path, eventually: Eventually) -> Iterator[Forks]:
    forks = Forks(tmp_path)
    eventually(forks.is_ready)
    yield forks
    forks.end()


def gone(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def close(client: subprocess.Popen[str]) -> int:
    with client:
        return client.wait(PATIENCE)


def test_command_runs_as_in_its_own_interpreter(forks: Forks) -> None:
    output, first, status = forks.run("sys.exit(3)")
    assert output.split()[:-1] == ["True", "['a',", "'b']", "hello", str(forks.folder)]
    assert status == 3

    _, second, status = forks.run("")
    assert status == 0
    # Otherwise, all workers would draw the same numbers.
    assert first != second

    _, errors, status = forks.run("raise ValueError('broken')")
    assert "ValueError: broken" in errors
    assert status == 1

    _, _, status = forks.run("import signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert status == 128 + signal.SIGKILL


def test_command_ends_with_its_client(forks: Forks, eventually: Eventually) -> None:
    client, command = forks.hanging()
    client.kill()
    close(client)
    eventually(lambda: gone(command))


def test_commands_and_clients_end_with_the_server(forks: Forks, eventually: Eventually) -> None:
    client, command = forks.hanging()
    forks.end()
    assert close(client) == 1
    eventually(lambda: gone(command))


def test_command_runs_without_a_server(forks: Forks) -> None:
    forks.end()
    output, _, status = forks.run("sys.exit(3)")
    assert output.startswith("False ['a', 'b'] hello")
    assert status == 3


def test_a_failed_fork_ends_nothing_and_its_command_runs_on_its_own(forks: Forks) -> None:
    # Given a command that runs, and no process number for another one
    client, _ = forks.hanging()
    with forks.limited(NO_PROCESSES):
        # When a command is requested, then it runs without the server's modules
        output, _, status = forks.run("sys.exit(3)")
        assert output.startswith("False ['a', 'b'] hello"), "the fault fired"
        assert status == 3

    # And the other command goes on, as does the server
    output, _ = client.communicate("print('alive'); sys.exit(4)", PATIENCE)
    assert output == "alive\n"
    assert client.returncode == 4
    assert forks.run("")[0].startswith("True")


def test_silent_and_invalid_clients_delay_nobody(forks: Forks) -> None:
    with forks.connect() as silent, forks.connect() as begun, forks.connect() as invalid:
        streams = [0, 1, 2]
        socket.send_fds(begun, [(100).to_bytes(fork_client.NUMBER_BYTES, "little")], streams)
        socket.send_fds(invalid, [(2).to_bytes(fork_client.NUMBER_BYTES, "little"), b"{}"], streams)
        assert invalid.recv(1) == b"", "it was dropped"

        assert forks.run("sys.exit(3)")[2] == 3

        for waiting in (silent, begun):
            waiting.setblocking(False)
            with pytest.raises(BlockingIOError):
                waiting.recv(1)


def test_a_client_that_stays_silent_is_dropped(tmp_path: Path, eventually: Eventually) -> None:
    forks = Forks(tmp_path, request_seconds=0.2)
    eventually(forks.is_ready)
    try:
        with forks.connect() as silent:
            assert silent.recv(1) == b""
    finally:
        forks.end()


def test_a_client_waits_while_the_server_can_open_nothing(
    forks: Forks, eventually: Eventually
) -> None:
    with forks.limited(NO_FILES):
        client = forks.start()
        eventually(lambda: "can't accept" in forks.log.read_text())
    output, _ = client.communicate("sys.exit(3)", PATIENCE)
    assert output.startswith("True")
    assert client.returncode == 3
