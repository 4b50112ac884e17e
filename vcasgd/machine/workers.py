"""The workers of this machine: a process for each order of the controller.

They run the same way on a node of Ray (:mod:`vcasgd.cluster.driver`) and on a machine that joined
(:mod:`vcasgd.agent`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from vcasgd.child_process import kill
from vcasgd.fork_server import CANNOT_FORK, ForkedCommand
from vcasgd.logging import last_lines
from vcasgd.schemas.fleet import WorkerOrder
from vcasgd.worker_names import machine_of

#: Bytes of a log that are kept on the disk; then it begins again.
MAX_LOG_BYTES = 32_000_000
#: Last lines of a log, one of which says why the process ended.
SHOWN_LINES = 10
#: Exit status of a shell for a process that signal 0 killed.
KILLED_STATUS = 128


class WorkerProcess:
    """A worker from its order to the end of its process.

    ``environment`` is that of the process. ``forks`` is the socket of a server that it can be a
    fork of. Use it in the main thread, because the process dies with the thread that starts it.
    """

    def __init__(
        self,
        order: WorkerOrder,
        folder: Path,
        environment: Mapping[str, str],
        forks: Path | None = None,
    ) -> None:
        self.order = order
        self._folder = folder
        self._environment = environment
        self._forks = forks
        self._log = folder / f"{order.start}.log"
        self._process: subprocess.Popen[bytes] | ForkedCommand | None = None
        #: Why there is no process, or why it was killed.
        self._error: str | None = None
        self._killed = False

    @property
    def ended(self) -> str | None:
        """Why the process has ended; None while it runs, or is about to."""
        if self._error is not None:
            return self._error
        status = None if self._process is None else self._process.poll()
        if status is None:
            return None
        if status == 0:
            return "it has left"
        if status == CANNOT_FORK:
            return "the machine has no memory or no process number for it"
        if status > KILLED_STATUS:
            status = KILLED_STATUS - status
        try:
            cause = signal.Signals(-status).name
        except ValueError:
            cause = f"status {status}"
        said = [line for line in last_lines(self._log, SHOWN_LINES) if line.strip()]
        return f"{cause}: {said[-1] if said else 'no output'}"

    @property
    def failed(self) -> bool:
        """True if the process has ended with an error."""
        if self._error is not None:
            return True
        return self._process is not None and self._process.poll() not in (None, 0)

    def update(self) -> None:
        """Start the process as soon as that is possible, and keep it within its limits."""
        if self._process is not None:
            self.enforce()
        elif self._error is None and self.ready:
            try:
                self._process = self._start()
            except OSError as error:
                self._error = f"it can't be started: {error}"

    def leave(self) -> None:
        """Ask the worker to leave in good order."""
        if self._process is None:
            self._error = "the machine leaves"
        elif self._process.poll() is None:
            self.terminate()

    def kill(self) -> None:
        """Kill the process; wait for its end the first time."""
        if self._process is None:
            self._error = self._error or "it was killed"
        elif self._process.poll() is None and not self._killed:
            self._killed = True
            kill(self._process)

    def remove(self) -> None:
        """Remove what the process has left."""
        self._log.unlink(missing_ok=True)

    # -- for machines with limits ------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True once the process can be started."""
        return True

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs the worker, whose own one is ``argv``."""
        return [sys.executable, *argv, "--parent", str(os.getpid())]

    def enforce(self) -> None:
        """Keep the process that runs within its limits."""
        if self._log.stat().st_size > MAX_LOG_BYTES:
            os.truncate(self._log, 0)

    def terminate(self) -> None:
        """Send SIGTERM to the process that runs."""
        if isinstance(self._process, subprocess.Popen):
            self._process.terminate()

    def _start(self) -> subprocess.Popen[bytes] | ForkedCommand:
        order = self.order
        argv = ["-m", "vcasgd.worker.main", "--job", order.job, "--worker", order.worker]
        argv += ["--machine", machine_of(order.worker)]
        # Appended to, so that it really begins again when it is truncated.
        with self._log.open("ab") as log:
            if self._forks is not None:
                with suppress(OSError):
                    return ForkedCommand.at(self._forks, argv, self._environment, self._folder, log)
            return subprocess.Popen(
                self.command(argv),
                env=dict(self._environment),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the machine's own process, which then asks its workers to leave.
                start_new_session=True,
            )


One = TypeVar("One", bound=WorkerProcess)
AnyOrder = TypeVar("AnyOrder", bound=WorkerOrder)


class WorkerSet(Generic[AnyOrder, One]):
    """The workers of a machine, by name. ``make`` makes one of an order."""

    def __init__(self, make: Callable[[AnyOrder], One]) -> None:
        self._make = make
        self._workers: dict[str, One] = {}
        #: Starts of workers that have ended, as far as :meth:`update` has returned them.
        self._ended: set[str] = set()

    def __iter__(self) -> Iterator[One]:
        return iter(list(self._workers.values()))

    @property
    def running(self) -> list[str]:
        """Names of workers that have not ended."""
        return [name for name, worker in self._workers.items() if worker.ended is None]

    def follow(self, orders: Iterable[AnyOrder], *, leaving: bool = False) -> list[AnyOrder]:
        """Kill the workers that are in no order, and return the orders that are new.

        Those are started, unless the machine is ``leaving``.
        """
        by_worker = {order.worker: order for order in orders}
        for name, worker in list(self._workers.items()):
            order = by_worker.get(name)
            if order is None or order.start != worker.order.start:
                worker.kill()
                if worker.ended is not None:
                    worker.remove()
                    del self._workers[name]
        new = [] if leaving else [o for n, o in by_worker.items() if n not in self._workers]
        for order in new:
            self._workers[order.worker] = self._make(order)
        self._ended &= {worker.order.start for worker in self}
        return new

    def update(self) -> list[One]:
        """Start workers that are ready, and return those that have ended since the last call."""
        for worker in self:
            worker.update()
        ended = [w for w in self if w.ended is not None and w.order.start not in self._ended]
        self._ended.update(worker.order.start for worker in ended)
        return ended

    def report(self, max_length: int) -> dict[str, dict[str, str | None]]:
        """Return the start of each worker, and why it has ended, if it has, in so many letters."""
        return {
            name: {"start": worker.order.start, "ended": ended and ended[:max_length]}
            for name, worker in self._workers.items()
            for ended in (worker.ended,)
        }

    def leave(self) -> None:
        """Ask all workers to leave in good order."""
        for worker in self:
            worker.leave()

    def kill(self) -> None:
        for worker in self:
            worker.kill()
