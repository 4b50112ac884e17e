"""Process of a worker on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vcasgd.errors import VcasgdError
from vcasgd.fleet.machine.notices import NOTICE_FILE_VARIABLE, write_notice
from vcasgd.logging import last_lines
from vcasgd.schemas.machines import LONGEST_REASON, OrderView, WorkerReportBody
from vcasgd.store.admission import SOCKETS
from vcasgd.worker_names import instance_of

#: Last lines of a log, one of which says why the process ended.
SHOWN_LINES = 10
#: Priority of workers (nice): everything else on this machine goes first.
NICENESS = 10


class WorkerProcess:
    """A worker: first its code is fetched, then its process runs until it ends.

    ``environment`` has the variables of this machine that it may see. ``fetch`` gets the code of
    the job. It runs in a thread; everything else in the main thread, because the worker dies with
    the thread that starts it.
    """

    def __init__(
        self,
        order: OrderView,
        folder: Path,
        sockets: Path,
        processors: list[int],
        heartbeat: float,
        environment: Mapping[str, str],
        fetch: Callable[[OrderView, Path], None],
    ) -> None:
        self.order = order
        self._folder = folder
        self._processors = processors
        self._process: subprocess.Popen[bytes] | None = None
        self._error: str | None = None
        self._log = folder / f"{order.start}.log"
        self._notice = folder / f"{order.start}.notice"
        self._env = {
            **environment,
            **{name: _local(value, sockets) for name, value in order.env.items()},
            "VCASGD_HEARTBEAT": str(heartbeat),
            "VCASGD_CACHE_DIR": str(folder / "code"),
            NOTICE_FILE_VARIABLE: str(self._notice),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": str(len(processors)),
            # Threads that wait would otherwise take processors from the owner's work.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._fetching = threading.Thread(target=self._fetch, args=(fetch,), daemon=True)
        self._fetching.start()

    def _fetch(self, fetch: Callable[[OrderView, Path], None]) -> None:
        try:
            fetch(self.order, self._folder / "code")
        except (VcasgdError, OSError) as error:
            self._error = f"its code can't be fetched: {error}"

    @property
    def ended(self) -> str | None:
        """Why the process has ended; None while it runs, or is about to."""
        if self._error is not None:
            return self._error
        if self._process is None or self._process.poll() is None:
            return None
        status = self._process.returncode
        if status == 0:
            return "it has left"
        cause = signal.Signals(-status).name if status < 0 else f"status {status}"
        said = [line for line in last_lines(self._log, SHOWN_LINES) if line.strip()]
        return f"{cause}: {said[-1] if said else 'no output'}"

    @property
    def failed(self) -> bool:
        """True if the process has ended with an error."""
        if self._error is not None:
            return True
        return self._process is not None and self._process.poll() not in (None, 0)

    @property
    def report(self) -> WorkerReportBody:
        """The state of the process."""
        ended = self.ended
        return WorkerReportBody(start=self.order.start, ended=ended and ended[:LONGEST_REASON])

    def update(self) -> None:
        """Start the process once its code is there."""
        if self._process is None and self._error is None and not self._fetching.is_alive():
            self._start()

    def _start(self) -> None:
        argv = [sys.executable, "-m", "vcasgd.worker.main"]
        argv += ["--job", self.order.job, "--worker", self.order.worker]
        argv += ["--instance", instance_of(self.order.worker)]
        argv += ["--parent", str(os.getpid())]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv,
                env=self._env,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the agent, which then asks its workers to leave.
                start_new_session=True,
            )
        # The process has no other threads yet.
        os.sched_setaffinity(self._process.pid, self._processors)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    def leave(self, at: float | None) -> None:
        """Make the worker leave: now, or by a time (Unix seconds), which it then uses."""
        if at is not None:
            write_notice(self._notice, at)
        elif self._process is None:
            self._error = "the machine leaves"
        elif self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process."""
        if self._process is None:
            self._error = self._error or "it was killed"
        elif self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def await_end(self, deadline: float) -> bool:
        """Wait for the end, until ``deadline`` (:func:`time.monotonic`). Return True if it came."""
        while self.ended is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.ended is not None


def _local(value: str, sockets: Path) -> str:
    """Return a value of an order for this machine."""
    return value.replace(f"@{SOCKETS}/", f"@{sockets}/")
