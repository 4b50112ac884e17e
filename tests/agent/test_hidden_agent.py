"""Protection of an agent from the code of jobs, which may run as the same user."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.children import Process
from support.waiting import PATIENCE, await_truth

TOKEN = "vcasgd_ann_" + "5" * 64
#: A process of root may read all others if it has capabilities, which few containers have.
UNPRIVILEGED = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
#: Reads a byte where the token was in the environment: in its file, or in the memory behind it.
READ_MEMORY = """
import sys
pid = sys.argv[1]
start = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[47])
memory = open(f"/proc/{pid}/mem", "rb")
memory.seek(start)
print(memory.read(1))
"""
#: Joins, and waits for the gateway for so long that it does not end before a test has looked at it.
JOIN = f"""
from vcasgd.agent import connection
connection.ANSWER_SECONDS = {PATIENCE}
connection.AgentConnection.__init__.__defaults__ = ({PATIENCE},)
from vcasgd.cli import main
main()
"""


@pytest.fixture
def silent_gateway() -> Iterator[int]:
    """Yield the port of a gateway that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def readable(pid: int) -> tuple[bool, bool]:
    """Return whether a process of the same user can read another one's environment and memory."""
    commands = ["cat", f"/proc/{pid}/environ"], [sys.executable, "-c", READ_MEMORY, str(pid)]
    done = [
        subprocess.run([*UNPRIVILEGED, *each], capture_output=True, timeout=PATIENCE, check=False)
        for each in commands
    ]
    assert all(b"denied" in each.stderr for each in done if each.returncode), done
    return done[0].returncode == 0, done[1].returncode == 0


def test_other_processes_of_the_user_can_not_read_the_token(
    silent_gateway: int, tmp_path: Path
) -> None:
    # Given a usual process with the token in its environment, which the same user can read
    env = {**os.environ, "VCASGD_TOKEN": TOKEN}
    usual = Process([*UNPRIVILEGED, "sleep", "600"], tmp_path / "usual.log", env)
    await_truth(lambda: Path(f"/proc/{usual.pid}/comm").read_text() == "sleep\n")
    assert readable(usual.pid) == (True, True)
    usual.end()

    # When an agent has started with it
    url = f"https://127.0.0.1:{silent_gateway}"
    argv = [*UNPRIVILEGED, sys.executable, "-c", JOIN, "join", url, "--sandbox", "off"]
    agent = Process(argv, tmp_path / "agent.log", env)
    try:
        # Then they can't read it any more
        await_truth(lambda: readable(agent.pid) == (False, False))
        assert agent.alive, (tmp_path / "agent.log").read_text()
    finally:
        agent.end()
