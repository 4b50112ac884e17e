"""Stacks of real processes, which each test starts and kills."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import is_alive, read_each
from support.servers import KINDS, require_binary
from support.stacks import FOREGROUND, OLD_SERVER, REDIS, StackHarness, program
from support.waiting import await_truth

from vcasgd.container_limits import memory_bytes
from vcasgd.errors import PortInUse, StackError, StoreUnsupported
from vcasgd.fleet.providers.local.machine import is_locked
from vcasgd.stack import ForegroundStack, StackHome, StackPhase, StackState, is_running, up
from vcasgd.stack.home import LOG_BYTES
from vcasgd.store.connection import connect

#: Program of servers, of which that of tensors waits for a file.
WAITING = """#!/bin/sh
case "$1" in *tensors*) while [ ! -e '{file}' ]; do sleep 0.05; done ;; esac
exec '{server}' "$@"
"""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StackHarness]:
    stack = StackHarness(tmp_path / "home")
    yield stack
    stack.down()
    stack.await_end()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackHarness]:
    """A stack for tests that leave it running."""
    stack = StackHarness(tmp_path_factory.mktemp("running"))
    stack.up((*REDIS, "server"))
    yield stack
    stack.down()
    stack.await_end()


@pytest.mark.ci
def test_a_command_that_is_interrupted_says_that_the_stack_goes_on(
    stack: StackHarness, tmp_path: Path
) -> None:
    text = WAITING.format(file=tmp_path / "never", server=require_binary(KINDS[0]))
    env = {**os.environ, "VCASGD_REDIS_SERVER": program(tmp_path, text)}

    def interrupted(when: Callable[[], object], *words: str) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "vcasgd.cli", *words, "--home", str(stack.home)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
            # Background jobs of a shell ignore SIGINT, and so would this process.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        await_truth(when)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
        assert process.returncode == 130
        return error

    def starts() -> bool:
        return is_running(stack.home) and "ledger" in stack.state().parts

    error = interrupted(starts, "up", "--port", "0")
    assert "goes on starting; stop it with: vcasgd down" in error
    assert is_running(stack.home)

    supervisor = stack.state().supervisor.pid
    os.kill(supervisor, signal.SIGSTOP)
    error = interrupted(lambda: has_pending(supervisor, signal.SIGTERM), "down")
    os.kill(supervisor, signal.SIGCONT)
    assert "goes on stopping; wait for it with: vcasgd down" in error


def test_up_that_is_interrupted_before_the_stack_exists_leaves_no_process(
    stack: StackHarness,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "vcasgd.cli", "up", "--port", "0", "--home", str(stack.home)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        (starting,) = await_truth(psutil.Process(process.pid).children)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in error
    # A stack that was there already goes on.
    await_truth(lambda: not is_alive(starting.pid))
    assert is_running(stack.home) is ("the stack goes on starting" in error)


def has_pending(pid: int, number: signal.Signals) -> bool:
    """Return True if a process that stands still has a signal to handle."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) & 1 << (number - 1))


def test_stack_starts_and_stops_without_remains(stack: StackHarness, tmp_path: Path) -> None:
    # Given a tensors server, which the parameter server needs, that starts once it may
    may_start = tmp_path / "may-start"
    text = WAITING.format(file=may_start, server=require_binary(KINDS[0]))
    states: list[dict[str, bool]] = []

    def progress(state: StackState) -> None:
        states.append({name: part.ready for name, part in state.parts.items()})
        if states[-1].get("ledger"):
            may_start.touch()

    state = up(
        stack.settings(redis_server=program(tmp_path, text)),
        names=(*REDIS, "server"),
        progress=progress,
    )

    assert state.phase is StackPhase.READY
    assert all(psutil.pid_exists(part.pid) and part.ready for part in state.parts.values())
    assert all(part.restarts == 0 for part in state.parts.values())
    assert any(each.get("ledger") and not each.get("server") for each in states)

    assert stack.down()
    assert not is_running(stack.home)
    assert stack.processes() == []
    assert stack.state().phase is StackPhase.STOPPED
    assert not stack.down()


@pytest.mark.ci
def test_a_stack_with_a_gateway_ends_in_order(stack: StackHarness) -> None:
    stack.up(("gateway", "api", "server", *REDIS), join_port=0)

    assert stack.down()

    # what needs another part ends before it, and as it was asked to
    ended = re.findall(r"(\S+) ended with status (-?\d+)", StackHome(stack.home).log_tail("stack"))
    assert [name for name, _ in ended] == ["gateway", "api", "server", "tensors", "ledger"]
    assert {status for _, status in ended} == {"0"}
    state = stack.state()
    assert state.phase is StackPhase.STOPPED
    assert not any(part.ready or part.pid for part in state.parts.values())


def test_killed_parts_restart(running: StackHarness) -> None:
    before = running.state()
    for name in REDIS:
        after = running.kill(name)
        assert after.restarts == 1
        assert after.pid != before.parts[name].pid
    assert running.ledger().ping()
    assert running.state().ports == before.ports


def test_second_stack_in_the_same_home_is_refused(running: StackHarness) -> None:
    url = running.state().api_url
    with pytest.raises(StackError, match=f"already running at {url}"):
        running.up()
    assert running.state().phase is StackPhase.READY


def test_port_in_use_is_an_error(stack: StackHarness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)) as caught:
            stack.up(api_port=port)
    assert "--port" in str(caught.value)
    stack.await_end()


def test_killed_supervisor_stops_everything(stack: StackHarness) -> None:
    before = stack.up()
    os.kill(before.supervisor.pid, signal.SIGKILL)

    stack.await_end()
    with pytest.raises(StackError, match="supervisor was killed"):
        stack.state().raise_error()

    assert stack.up().ports == before.ports


@pytest.mark.extended
def test_killed_guardian_stops_everything(stack: StackHarness) -> None:
    guardian = psutil.Process(stack.up().supervisor.pid).parent()
    assert guardian is not None
    guardian.kill()
    stack.await_end()
    assert stack.state().phase is StackPhase.STOPPED


@pytest.mark.extended
def test_foreground_stack_ends_with_its_parent(stack: StackHarness) -> None:
    command = [sys.executable, "-c", FOREGROUND, str(stack.home)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
    stack.await_end()


def test_foreground_stack_can_be_stopped_before_it_is_ready(stack: StackHarness) -> None:
    ForegroundStack(stack.settings(), REDIS).stop()
    assert stack.processes() == []


@pytest.mark.extended
@pytest.mark.slow
def test_killed_head_takes_its_helpers_along_and_restarts(stack: StackHarness) -> None:
    stack.up(("ledger", "head"))
    head = psutil.Process(stack.part("head").pid)
    await_truth(
        lambda: {"gcs_server", "raylet"} <= set(read_each(_below(head), psutil.Process.name))
    )
    helpers = _below(head)

    stack.kill("head")

    assert not any(helper.is_running() for helper in helpers)
    scratch = Path(stack.state().scratch)
    assert scratch.is_dir()
    stack.down()
    assert stack.processes() == []
    assert not scratch.exists()


@pytest.mark.extended
@pytest.mark.slow
def test_down_cleans_up_after_all_were_killed_at_once(stack: StackHarness) -> None:
    state = stack.up(("ledger", "head"))
    supervisor = psutil.Process(state.supervisor.pid)
    guardian = supervisor.parent()
    assert guardian is not None
    guardian.suspend()
    supervisor.kill()
    guardian.kill()
    await_truth(lambda: not is_running(stack.home))

    assert not stack.down()
    assert stack.processes() == []


def test_part_that_dies_at_start_is_an_error_with_its_log(
    stack: StackHarness, tmp_path: Path
) -> None:
    server = program(tmp_path, "#!/bin/sh\necho out of luck >&2\nexit 1\n")
    # Both servers have this program, and die three times in any order.
    with pytest.raises(StackError, match=r"(?s)(ledger|tensors) died 3 times.*out of luck"):
        stack.up(redis_server=server)
    stack.await_end()


def test_unsupported_server_is_refused(stack: StackHarness, tmp_path: Path) -> None:
    server = program(tmp_path, OLD_SERVER)
    with pytest.raises(StoreUnsupported, match=r"server is version 6\.2\.14") as caught:
        stack.up(redis_server=server)
    assert "Redis 7" in str(caught.value)
    stack.await_end()


def test_missing_server_program_is_an_error(stack: StackHarness, tmp_path: Path) -> None:
    with pytest.raises(StackError, match="nothing-here is not an executable program"):
        stack.up(redis_server=str(tmp_path / "nothing-here"))


def test_external_servers_are_used_and_keep_running(stack: StackHarness, tmp_path: Path) -> None:
    other = StackHarness(tmp_path / "other")
    try:
        theirs = other.up(("ledger",))
        password = StackHome(other.home).ensure_password("ledger")
        url = f"redis://:{password}@127.0.0.1:{theirs.ports['ledger']}/0"

        state = stack.up(ledger_url=url)

        assert set(state.parts) == {"tensors"}
        stack.down()
        assert other.ledger().ping()
    finally:
        other.down()


def test_unreachable_external_server_is_an_error(stack: StackHarness) -> None:
    with pytest.raises(StackError, match="ledger server does not answer") as caught:
        stack.up(ledger_url="redis://:secret@127.0.0.1:1/0")
    assert "VCASGD_LEDGER_URL" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_secrets_stay_in_private_files(running: StackHarness) -> None:
    home = StackHome(running.home)
    secrets = [home.ensure_token(), *map(home.ensure_password, ("ledger", "tensors", "jobs"))]

    for path in (home.token_file, home.secrets_file):
        assert path.stat().st_mode & 0o777 == 0o600
    shown = [" ".join(line) for line in read_each(running.processes(), psutil.Process.cmdline)]
    shown += [path.read_text() for path in (*home.logs.iterdir(), running.home / "stack.json")]
    assert not any(secret in text for secret in secrets for text in shown)


def test_parts_do_not_inherit_the_lock(running: StackHarness) -> None:
    """Machines run while the lock is held, so only its owners may hold it."""
    state = running.state()
    lock = running.home / "stack.lock"
    assert is_locked(lock)
    opened = read_each(running.processes(), lambda each: (each.pid, each.open_files()))
    path = str(lock.resolve())
    holders = {pid for pid, files in opened if path in [file.path for file in files]}
    assert state.supervisor.pid in holders
    assert not holders & {part.pid for part in state.parts.values()}


@pytest.mark.parametrize("limit_mb", [None, 64])
def test_tensors_servers_have_a_memory_limit(stack: StackHarness, limit_mb: int | None) -> None:
    """Without a limit, fast workers would exhaust the machine's memory."""
    state = stack.up(store_nodes=2, names=("tensors",), tensors_memory_mb=limit_mb)
    limits = []
    for name in sorted(state.parts):
        url = (
            f"redis://:{StackHome(stack.home).ensure_password(name)}@127.0.0.1:{state.ports[name]}"
        )
        client = connect(url)
        limits.append(int(client.info("memory")["maxmemory"]))
        client.close()

    machine = memory_bytes()
    assert len(limits) == 2
    if limit_mb:
        assert limits == [64 << 20, 64 << 20]
    else:
        assert 0.4 * machine < sum(limits) <= 0.55 * machine


@pytest.mark.extended
def test_large_log_is_rotated_at_the_next_start(stack: StackHarness) -> None:
    home = StackHome(stack.home)
    home.create()
    home.log("ledger").write_bytes(b"x" * (LOG_BYTES + 1))
    stack.up(("ledger",))
    assert home.log("ledger").stat().st_size < LOG_BYTES
    assert (home.logs / "ledger.log.1").stat().st_size == LOG_BYTES + 1


def _below(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)
