"""Commands in forks of a process that has imported their modules."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support.waiting import PATIENCE, await_truth

from vcasgd.fork_server import CANNOT_FORK, NUMBER_BYTES, ForkedCommand

#: Numbers of the files with output.
NUMBERS = itertools.count()
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
ForkServer(listener).serve()
"""
COMMAND = f"""
import os, random, sys
code = sys.argv.pop()
print("{MODULE}" in sys.modules, sys.argv[1:], os.environ["GREETING"], os.getcwd(), os.getpid())
print(random.random(), flush=True)
exec(code)
"""


class Forks:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "s"
        self.command = folder / "command.py"
        self.command.write_text(COMMAND)
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(self.path)], stderr=log
            )

    def is_ready(self) -> bool:
        """Return True once signals limit the server instead of ending it."""
        return "ready" in self.log.read_text()

    def start(self, code: str) -> tuple[ForkedCommand, Path]:
        """Start a command, and return the file with its output."""
        output, env = self.folder / f"output-{next(NUMBERS)}", {**os.environ, "GREETING": "hello"}
        with output.open("wb") as file:
            argv = [str(self.command), "a", "b", code]
            return ForkedCommand.at(self.path, argv, env, self.folder, file), output

    def run(self, code: str) -> tuple[str, int]:
        command, output = self.start(code)
        status = command.wait(PATIENCE)
        return output.read_text(), status

    def hanging(self) -> tuple[ForkedCommand, psutil.Process]:
        """Return a command that runs until it is killed, and its process."""
        command, output = self.start("import time; time.sleep(1000)")
        lines = await_truth(lambda: len(found := output.read_text().splitlines()) == 2 and found)
        return command, psutil.Process(int(lines[0].split()[-1]))

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(PATIENCE)
        client.connect(str(self.path))
        return client

    @contextmanager
    def limited(self, by: signal.Signals) -> Iterator[None]:
        self.server.send_signal(by)
        yield
        self.server.send_signal(by)

    def end(self) -> None:
        self.server.kill()
        self.server.wait(PATIENCE)


@contextmanager
def served(folder: Path) -> Iterator[Forks]:
    forks = Forks(folder)
    try:
        await_truth(forks.is_ready)
        yield forks
    finally:
        forks.end()


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """A server that no test ends."""
    with served(tmp_path_factory.mktemp("forks")) as forks:
        yield forks


def gone(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_command_runs_as_in_its_own_interpreter(forks: Forks) -> None:
    first, status = forks.run("sys.exit(3)")
    assert first.split()[:-2] == ["True", "['a',", "'b']", "hello", str(forks.folder)]
    assert status == 3

    second, status = forks.run("")
    assert status == 0
    # Otherwise, all workers would draw the same numbers.
    assert first.split()[-1] != second.split()[-1]

    errors, status = forks.run("raise ValueError('broken')")
    assert "ValueError: broken" in errors
    assert status == 1

    _, status = forks.run("import signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert status == 128 + signal.SIGKILL


def test_command_that_is_killed_reports_its_end(forks: Forks) -> None:
    command, process = forks.hanging()
    assert command.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(0.1)
    command.kill()
    assert command.wait(PATIENCE) == 128 + signal.SIGKILL
    assert gone(process)


def test_command_ends_with_its_client(forks: Forks) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from vcasgd.fork_server import ForkedCommand\n"
        "path, command, folder = map(Path, sys.argv[1:])\n"
        "argv = [str(command), 'import time; time.sleep(1000)']\n"
        "env = {**os.environ, 'GREETING': 'hello'}\n"
        "with Path(folder, 'output').open('wb') as file:\n"
        "    kept = ForkedCommand.at(path, argv, env, folder, file)\n"
        "time.sleep(1000)\n"
    )
    argv = [sys.executable, "-c", code, forks.path, forks.command, forks.folder]
    with subprocess.Popen(argv) as client:
        output = forks.folder / "output"
        await_truth(lambda: output.exists() and "\n" in output.read_text())
        process = psutil.Process(int(output.read_text().splitlines()[0].split()[-1]))
        client.kill()
    await_truth(lambda: gone(process))


def test_commands_end_with_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as forks:
        command, process = forks.hanging()
    assert command.wait(PATIENCE) == 1
    await_truth(lambda: gone(process))
    with pytest.raises(OSError, match="refused"):
        forks.start("")


def test_a_failed_fork_is_reported_and_ends_nothing(forks: Forks) -> None:
    # Given a command that runs, and no process number for another one
    command, _ = forks.hanging()
    with forks.limited(NO_PROCESSES):
        # When a command is requested, then it doesn't start
        assert forks.run("sys.exit(3)") == ("", CANNOT_FORK), "the fault fired"

    # And the other command goes on, as does the server
    assert command.poll() is None
    assert forks.run("")[0].startswith("True")
    command.kill()
    assert command.wait(PATIENCE) == 128 + signal.SIGKILL


def test_silent_and_invalid_clients_delay_nobody(forks: Forks) -> None:
    with forks.connect() as silent, forks.connect() as begun, forks.connect() as invalid:
        streams = [0, 1, 2]
        socket.send_fds(begun, [(100).to_bytes(NUMBER_BYTES, "little")], streams)
        socket.send_fds(invalid, [(2).to_bytes(NUMBER_BYTES, "little"), b"{}"], streams)
        assert invalid.recv(1) == b"", "it was dropped"

        assert forks.run("sys.exit(3)")[1] == 3

        for waiting in (silent, begun):
            waiting.setblocking(False)
            with pytest.raises(BlockingIOError):
                waiting.recv(1)


def test_a_client_waits_while_the_server_can_open_nothing(forks: Forks) -> None:
    with forks.limited(NO_FILES):
        command, _ = forks.start("sys.exit(3)")
        await_truth(lambda: "can't accept" in forks.log.read_text())
    assert command.wait(PATIENCE) == 3
