"""Process of a worker on this machine."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from vcasgd import container_limits
from vcasgd.agent import sandbox as inside
from vcasgd.agent.sandbox import NICENESS, Sandbox
from vcasgd.child_process import kill
from vcasgd.errors import VcasgdError
from vcasgd.fleet.machine.notices import NOTICE_FILE_VARIABLE, write_notice
from vcasgd.logging import last_lines
from vcasgd.schemas.machines import MAX_REASON_LENGTH, OrderView, WorkerReportBody
from vcasgd.store.admission import SOCKETS
from vcasgd.worker_names import machine_of

#: Bytes of a log that are kept on the disk; then it begins again.
MAX_LOG_BYTES = 32_000_000
#: Last lines of a log, one of which says why the process ended.
SHOWN_LINES = 10
#: Seconds between two looks at the memory of a sandbox.
LOOK_SECONDS = 0.5
#: Exit status of a shell, and of bubblewrap, for a process that signal 0 killed.
KILLED_STATUS = 128


class WorkerProcess:
    """A worker: first its code is fetched, then its process runs until it ends.

    ``environment`` has the variables of this machine that it may see. Without a ``sandbox``, it can
    do all that this user can do. ``fetch`` gets the code of the job. It runs in a thread;
    everything else in the main thread, because the worker dies with the thread that starts it.
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
        sandbox: Sandbox | None = None,
    ) -> None:
        self.order = order
        self._folder = folder
        self._sockets = sockets
        self._sandbox = sandbox
        self._next_look = 0.0
        self._processors = processors
        self._process: subprocess.Popen[bytes] | None = None
        self._error: str | None = None
        self._killed = False
        self._log = folder / f"{order.start}.log"
        self._code, self._control = folder / "code", folder / order.start
        self._control.mkdir(exist_ok=True)
        self._notice = self._control / "notice"
        self._env = {
            **environment,
            **self._places(),
            "VCASGD_HEARTBEAT": str(heartbeat),
            "OMP_NUM_THREADS": str(min(len(processors), math.ceil(container_limits.processors()))),
            # Threads that wait would otherwise take processors from the owner's work.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._fetching = threading.Thread(target=self._fetch, args=(fetch,), daemon=True)
        self._fetching.start()

    def _places(self) -> dict[str, str]:
        """Return the variables with paths as the worker sees them."""
        boxed = self._sandbox is not None
        sockets = inside.SERVERS if boxed else self._sockets
        return {
            **{name: _local(value, sockets) for name, value in self.order.env.items()},
            "VCASGD_CACHE_DIR": str(inside.CODE if boxed else self._code),
            NOTICE_FILE_VARIABLE: str((inside.CONTROL if boxed else self._control) / "notice"),
            "TMPDIR": str(inside.TEMPORARY if boxed else self._folder),
            **({"HOME": str(inside.HOME)} if boxed else {}),
        }

    def _fetch(self, fetch: Callable[[OrderView, Path], None]) -> None:
        try:
            fetch(self.order, self._code)
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
        if self._sandbox is not None and status > KILLED_STATUS:
            status = KILLED_STATUS - status
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
        return WorkerReportBody(start=self.order.start, ended=ended and ended[:MAX_REASON_LENGTH])

    def update(self) -> None:
        """Start the process once its code is there; kill it if it takes too much memory."""
        if self._process is None and self._error is None and not self._fetching.is_alive():
            self._start()
        elif self._process is not None and self._sandbox is not None:
            self._enforce(self._sandbox)

    def _start(self) -> None:
        argv = [sys.executable, "-m", "vcasgd.worker.main"]
        argv += ["--job", self.order.job, "--worker", self.order.worker]
        argv += ["--machine", machine_of(self.order.worker)]
        if self._sandbox is None:
            argv += ["--parent", str(os.getpid())]
        else:
            package = self.order.package
            places = {inside.CONTROL: self._control, inside.SERVERS: self._sockets,
                      inside.CODE / package: self._code / package}  # fmt: skip
            argv = self._sandbox.command(argv, places)
        # Appended to, so that it really begins again when it is truncated.
        with self._log.open("ab") as log:
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
        if self._sandbox is None:
            # The process has no other threads yet.
            os.sched_setaffinity(self._process.pid, self._processors)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    def _enforce(self, sandbox: Sandbox) -> None:
        """Kill the worker if it takes more memory than it may; keep it on its processors."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        if self._log.stat().st_size > MAX_LOG_BYTES:
            os.truncate(self._log, 0)
        processes = list(self._boxed())
        for process in processes:
            _keep_on(self._processors, process)
        # Memory that processes share counts for each of them in the first sum, which is quick.
        if sum(map(_resident, processes)) <= sandbox.memory:
            return
        used = sum(map(_proportional, processes))
        if used > sandbox.memory:
            self.kill()
            self._error = (
                f"it used {used / 1e9:.2f} GB of memory; its machine allows "
                f"{sandbox.memory / 1e9:.2f} GB (--max-memory)"
            )

    def _boxed(self) -> Iterator[psutil.Process]:
        """Return the processes in the sandbox, but for the first one, which is bubblewrap's own."""
        if self._process is not None:
            with suppress(psutil.Error):
                yield from psutil.Process(self._process.pid).children(recursive=True)[1:]

    def leave(self, seconds: float | None) -> None:
        """Make the worker leave: now, or within so many seconds, which it then uses."""
        if seconds is not None:
            write_notice(self._notice, seconds)
        elif self._process is None:
            self._error = "the machine leaves"
        elif self._process.poll() is None:
            self._terminate(self._process)

    def _terminate(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM to the worker; bubblewrap would not pass it on."""
        boxed = list(self._boxed())
        if not boxed:
            process.terminate()
        for each in boxed:
            with suppress(psutil.Error):
                each.terminate()

    def remove(self) -> None:
        """Remove what the process left outside its sandbox."""
        self._log.unlink(missing_ok=True)
        shutil.rmtree(self._control, ignore_errors=True)

    def kill(self) -> None:
        """Kill the process; wait for its end the first time."""
        if self._process is None:
            self._error = self._error or "it was killed"
        elif self._process.poll() is None and not self._killed:
            self._killed = True
            kill(self._process)


def _local(value: str, sockets: Path) -> str:
    """Return a value of an order for this machine."""
    return value.replace(f"@{SOCKETS}/", f"@{sockets}/")


def _resident(process: psutil.Process) -> int:
    """Return the memory of a process in bytes; 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _proportional(process: psutil.Process) -> int:
    """Return the memory of a process, and its part of what it shares, in bytes."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def _keep_on(processors: list[int], process: psutil.Process) -> None:
    """Keep the threads of a process on these processors."""
    with suppress(OSError):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if not os.sched_getaffinity(int(task.name)) <= set(processors):
                os.sched_setaffinity(int(task.name), processors)
