"""Up and down: a stack as seen from outside of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import SecretStr

from vcasgd.errors import StackError
from vcasgd.fleet.providers.local.instance import is_locked
from vcasgd.settings import Settings
from vcasgd.stack.child import die_with_parent
from vcasgd.stack.cleanup import destroy_instances, remove_scratch, sweep
from vcasgd.stack.home import StackHome
from vcasgd.stack.parts import PARTS
from vcasgd.stack.state import StackState
from vcasgd.stack.supervisor import START_SECONDS

#: exit status of the guardian when another one holds the lock
ALREADY_RUNNING = 3
#: an interpreter that has not imported us by then never will
SPAWN_SECONDS = 120.0
#: more than all the time limits of an orderly end together
DOWN_SECONDS = 180.0
#: what the guardian takes to clean up after a supervisor that was killed
CLEAN_UP_SECONDS = 30.0
POLL_SECONDS = 0.05

Progress = Callable[[StackState], None]


def _silent(_state: StackState) -> None:
    """No progress is shown."""


def is_running(home: Path) -> bool:
    """Whether a stack lives there, in whatever phase."""
    return is_locked(StackHome(home).lock)


def environment(settings: Settings) -> dict[str, str]:
    """The settings that were given, by whatever way, as another process of ours reads them."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    given["home"] = settings.home_path
    return {
        f"VCASGD_{name.upper()}": (
            value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        )
        for name, value in given.items()
        if value is not None
    }


def up(
    settings: Settings, *, names: Sequence[str] = PARTS, progress: Progress = _silent
) -> StackState:
    """Starts a stack in the background; returns when all of it is ready.

    Raises :class:`StackError` when there is one already, or when it does not become ready;
    then everything is stopped again. :class:`~vcasgd.errors.PortInUse` is one of the reasons.
    """
    home = _free_home(settings)
    process = _spawn(settings, home, ["--detach", "--parts", ",".join(names)])
    try:
        status = process.wait(SPAWN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    if status == ALREADY_RUNNING:
        raise _already_running(home)
    if status != 0:
        raise StackError(f"the stack did not start:\n{home.log_tail('stack')}")
    return _await_ready(home, progress, lambda: is_running(home.path))


class ForegroundStack:
    """A stack that never outlives this process; make and end it in the main thread."""

    def __init__(self, settings: Settings, names: Sequence[str] = PARTS) -> None:
        """Begins to start it. Raises :class:`StackError` when there is one already."""
        self._settings = settings
        self._home = _free_home(settings)
        arguments = ["--parts", ",".join(names)]
        self._process = _spawn(settings, self._home, arguments, die_with_parent(signal.SIGTERM))

    def await_ready(self, progress: Progress = _silent) -> StackState:
        """Raises as :func:`up` does."""
        return _await_ready(self._home, progress, lambda: self._process.poll() is None)

    def stop(self) -> None:
        """Ends it and all that belongs to it. Raises :class:`StackError` if it does not end."""
        self._process.terminate()
        try:
            self._process.wait(DOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # after an orderly end there is nothing left to do
        down(self._settings)


@contextlib.contextmanager
def running(
    settings: Settings, *, names: Sequence[str] = PARTS, progress: Progress = _silent
) -> Iterator[StackState]:
    """A stack for as long as the context lasts. Raises as :func:`up` does."""
    stack = ForegroundStack(settings, names)
    try:
        yield stack.await_ready(progress)
    finally:
        stack.stop()


def down(settings: Settings) -> bool:
    """Stops the stack and all that belongs to it; what it stored stays.

    Returns ``False`` where none was running. Raises :class:`StackError` if it does not end.
    """
    home = StackHome(settings.home)
    was_running = is_running(home.path)
    if was_running:
        _terminate(home)
    lock = home.acquire() if home.path.is_dir() else None
    if lock is not None:
        with lock:
            state = StackState.read_or_new(home.path)
            sweep(home, state)
            destroy_instances(home, settings, state.parts)
            remove_scratch(state)
    return was_running


def _free_home(settings: Settings) -> StackHome:
    home = StackHome(settings.home)
    home.create()
    if is_running(home.path):
        raise _already_running(home)
    return home


def _already_running(home: StackHome) -> StackError:
    url = StackState.read_or_new(home.path).api_url
    return StackError(
        f"the stack in {home.path} is already running{f' at {url}' if url else ''}",
        remedy="look at it with vcasgd status, stop it with vcasgd down",
    )


def _spawn(
    settings: Settings,
    home: StackHome,
    arguments: list[str],
    prepare: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    foreign = {name: value for name, value in os.environ.items() if name[:7] != "VCASGD_"}
    with home.open_log("stack") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "vcasgd.stack", *arguments],
            env={**foreign, **environment(settings)},
            cwd=home.path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=prepare,
        )


def _await_ready(home: StackHome, progress: Progress, alive: Callable[[], bool]) -> StackState:
    deadline = time.monotonic() + SPAWN_SECONDS + START_SECONDS + DOWN_SECONDS
    while time.monotonic() < deadline:
        living = alive()
        state = StackState.read_or_new(home.path)
        progress(state)
        if state.is_ready:
            return state
        if not living:
            state.raise_error()
            raise StackError(f"the stack ended at once:\n{home.log_tail('stack')}")
        time.sleep(POLL_SECONDS)
    raise StackError("the stack does not get ready, and does not say why")


def _terminate(home: StackHome) -> None:
    if _signal_until_free(home, signal.SIGTERM, DOWN_SECONDS):
        return
    if not _signal_until_free(home, signal.SIGKILL, CLEAN_UP_SECONDS):
        raise StackError(f"the stack in {home.path} does not end", remedy=f"see {home.logs}")


def _signal_until_free(home: StackHome, number: signal.Signals, seconds: float) -> bool:
    """Sends a signal to the supervisor, once, as soon as it is known."""
    deadline, sent = time.monotonic() + seconds, False
    while is_running(home.path):
        supervisor = StackState.read_or_new(home.path).supervisor.process
        if not sent and supervisor is not None and supervisor.alive():
            os.kill(supervisor.pid, number)
            sent = True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
