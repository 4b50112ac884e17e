"""Process of a part, with its restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from vcasgd.backoff import backoff
from vcasgd.child_process import kill
from vcasgd.cluster.commands import Command
from vcasgd.errors import StackError
from vcasgd.fleet.providers.local.processes import Process, kill_all
from vcasgd.fork_server import die_with
from vcasgd.stack.home import PartState, StackHome
from vcasgd.stack.parts import StackPart, mark

#: Seconds before a dead part is restarted; doubles with each death until the part is healthy.
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 10.0
#: Seconds that a part must be ready to count as healthy, which resets its pause.
HEALTHY_SECONDS = 30.0
#: Seconds between two probes of a part that is not ready.
PROBE_PAUSE_SECONDS = 0.1
#: Seconds until the next probe after one that raised an error.
REFUSED_PAUSE_SECONDS = 5.0
#: Seconds between two checks whether a part may start.
WAIT_SECONDS = 0.3
#: Variables that parts don't inherit; each part gets only the secrets it needs.
SECRETS = (
    "VCASGD_TOKEN",
    "VCASGD_RAY_TOKEN",
    "VCASGD_JOB_SECRET",
    "VCASGD_SECRETS_KEY",
    "VCASGD_WEBHOOK_URL",
    "VCASGD_WEBHOOK_SECRET",
    "VCASGD_LEDGER_URL",
    "VCASGD_TENSORS_URL",
)


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a ``preexec_fn`` that sends the new process a signal when its parent dies.

    The signal is sent when the thread that started the process exits, so start it in the main
    thread.
    """
    return partial(die_with, os.getpid(), number)


class Child:
    """Process of one part. :meth:`update` starts it when it is due, and restarts it."""

    def __init__(
        self, part: StackPart, home: StackHome, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.part = part
        self.state = PartState()
        self._home = home
        self._clock = clock
        #: Deaths in a row, and when the next start is due.
        self._failures, self._start_at = 0, 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._probe_at = 0.0
        self._ready_at = 0.0

    @property
    def deaths(self) -> int:
        """Number of times that the process has died."""
        return self.state.restarts + (self._process is None and self.state.started_at > 0)

    def update(self, may_start: bool) -> bool:
        """Reap, start or probe the process, and return True if its state changed.

        Raises :class:`~vcasgd.errors.VcasgdError` if the part can never become ready.
        """
        before = self.state
        self._home.limit_log(self.part.name)
        if self._process is not None and self._process.poll() is not None:
            self._reap()
        elif self._process is None and may_start and self._clock() >= self._start_at:
            self._start()
        elif self._process is not None and not self.state.ready:
            self._probe()
        return self.state != before

    def stop(self, seconds: float) -> int | None:
        """Ask the process to end, and kill it and its helpers after ``seconds``.

        Returns its exit status, or None if it doesn't run.
        """
        process = self._process
        if process is None:
            return None
        process.send_signal(self.part.stop_signal)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        self._reap()
        return process.returncode

    def _start(self) -> None:
        command = self.part.command()
        if command is None:
            self._start_at = self._clock() + WAIT_SECONDS
            return
        started_at = time.time()
        try:
            with self._home.open_log(self.part.name) as log:
                self._process = self._spawn(command, log.fileno())
        except OSError as error:
            self._begin_pause()
            raise StackError(f"{self.part.name} can't be started: {error}") from error
        self.state = PartState(
            pid=self._process.pid,
            ticks=Process.of(self._process.pid).started,
            started_at=started_at,
            restarts=self.state.restarts + (self.state.started_at > 0),
        )

    def _spawn(self, command: Command, output: int) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if name not in SECRETS}
        return subprocess.Popen(
            command.argv,
            env={**inherited, **command.env},
            cwd=self._home.path,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Its own session, so that Ctrl-C does not reach it.
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )

    def _reap(self) -> None:
        """Kill the helpers that the process left, so that they don't disturb its successor."""
        kill_all(mark(self._home, self.part.name), self.state.process)
        if self._process is not None:
            kill(self._process)
            self._process = None
        if self.state.ready and self._clock() - self._ready_at > HEALTHY_SECONDS:
            self._failures = 0
        self._begin_pause()
        self.state = replace(self.state, pid=0, ticks=0, ready=False)

    def _begin_pause(self) -> None:
        """Begin a pause that grows with each failure."""
        self._failures += 1
        pause = backoff(self._failures, FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        self._start_at = self._clock() + pause

    def _probe(self) -> None:
        if self._clock() < self._probe_at:
            return
        self._probe_at = self._clock() + REFUSED_PAUSE_SECONDS
        if self.part.ready(self.state.started_at):
            self._ready_at = self._clock()
            self.state = replace(self.state, ready=True)
        self._probe_at = self._clock() + PROBE_PAUSE_SECONDS
