"""Entry point of a stack: the guardian process, which forks the supervisor.

    python -m vcasgd.stack [--detach] [--parts ledger,tensors,…]

Exit status: 0 after SIGTERM, 1 if the stack did not start (``stack.json`` has the reason), 3 if
another stack holds the lock.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from vcasgd.child_process import adopt_orphans
from vcasgd.errors import StackError, VcasgdError
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.stack.child import die_with_parent
from vcasgd.stack.cleanup import kill_remaining
from vcasgd.stack.control import ALREADY_RUNNING
from vcasgd.stack.home import PartState, StackHome, StackPhase, StackState
from vcasgd.stack.layout import StackLayout
from vcasgd.stack.parts import PARTS
from vcasgd.stack.supervisor import Supervisor

log = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vcasgd.stack")
    parser.add_argument("--detach", action="store_true", help="continue in the background")
    parser.add_argument("--parts", type=lambda text: tuple(text.split(",")), default=PARTS)
    arguments = parser.parse_args()
    configure_logging("guardian")
    try:
        return _lock_and_run(load_settings(), arguments.parts, detach=arguments.detach)
    except VcasgdError as error:
        return exit_status(error)


def _lock_and_run(settings: Settings, names: Sequence[str], *, detach: bool) -> int:
    """Run the stack and exit the process. Returns only if another stack holds the lock."""
    home = StackHome(settings.home)
    home.create()
    lock = home.acquire()
    if lock is None:
        return ALREADY_RUNNING
    with lock:  # All forked processes share the lock; it is free when the last one exits.
        before = StackState.read_or_new(home.path)
        replace(before, phase=StackPhase.STARTING, supervisor=PartState(), error=None).write(
            home.path
        )
        if detach:
            _detach()
        status = _guard(home, settings, names)
        logging.shutdown()
        os._exit(status)  # Holds the lock to the end, so the next owner finds no process here.


def _detach() -> None:
    """Continue in a forked process with its own session."""
    if os.fork():
        os._exit(0)
    os.setsid()


def _guard(home: StackHome, settings: Settings, names: Sequence[str]) -> int:
    # Orphaned helpers of killed parts become children of this process instead of init.
    adopt_orphans()
    prepare = die_with_parent(signal.SIGTERM)
    supervisor = os.fork()
    if not supervisor:
        prepare()
        configure_logging("supervisor", settings.log_level)
        return _supervise(home, settings, names)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(supervisor, signal.SIGTERM))
    status = _wait_for(supervisor)
    kill_remaining(home, StackState.read(home.path))  # None after an orderly end.
    if status < 0:
        _record_crash(home, signal.Signals(-status).name)
    return abs(status)


def _supervise(home: StackHome, settings: Settings, names: Sequence[str]) -> int:
    before = StackState.read_or_new(home.path)
    try:
        kill_remaining(home, before)
        supervisor = Supervisor(StackLayout.plan(home, settings, before), names)
    except VcasgdError as error:
        before.with_error(error).write(home.path)
        return exit_status(error)
    return supervisor.run()


def _wait_for(supervisor: int) -> int:
    """Return the supervisor's exit status, negative for a signal, and reap adopted processes."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            return os.waitstatus_to_exitcode(status)


def _record_crash(home: StackHome, signal_name: str) -> None:
    error = StackError(f"the supervisor was killed ({signal_name})", remedy="vcasgd up")
    log.error("%s", error.message)
    state = StackState.read(home.path)
    parts = {name: replace(part, pid=0, ticks=0, ready=False) for name, part in state.parts.items()}
    replace(state, parts=parts, supervisor=PartState()).with_error(error).write(home.path)


if __name__ == "__main__":
    sys.exit(main())
