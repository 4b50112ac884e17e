"""Commands in forks of a process that has imported their modules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import PATIENCE

from vcasgd import fork_client

Eventually = Callable[..., Any]

#: A module that nothing else imports.
MODULE = "wave"
SERVER = f"""
import sys
from pathlib import Path
from vcasgd.fork_server import ForkServer, listen, preload
listener = listen(Path(sys.argv[1]))
preload(["{MODULE}"])
ForkServer(listener).serve()
"""
COMMAND = f"""
import os, random, sys
print("{MODULE}" in sys.modules, sys.argv[1:], os.environ["GREETING"], os.getcwd(), os.getpid())
print(random.random(), file=sys.stderr)
exec(sys.stdin.read())
"""


class Forks:
    """A server of forks, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "s"
        self.command = folder / "command.py"
        self.command.write_text(COMMAND)
        self.server = subprocess.Popen([sys.executable, "-c", SERVER, str(self.path)])

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

    def end(self) -> None:
        self.server.kill()
        self.server.wait(PATIENCE)


@pytest.fixture
def forks(tmp_path: Path, eventually: Eventually) -> Iterator[Forks]:
    forks = Forks(tmp_path)
    eventually(forks.path.exists)
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
