"""A worker on a machine that joined: its code is fetched first, and it may run in a sandbox."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from vcasgd import container_limits
from vcasgd.agent import sandbox as inside
from vcasgd.agent.availability import Terms
from vcasgd.agent.sandbox import NICENESS
from vcasgd.fleet.notices import NOTICE_FILE_VARIABLE
from vcasgd.fork_server import ForkedCommand
from vcasgd.machine.workers import WorkerProcess
from vcasgd.schemas.joining import OrderView
from vcasgd.store.admission import SOCKETS

#: Seconds between two looks at the memory of a sandbox.
LOOK_SECONDS = 0.5
#: Folders in that of the agent: of the machine's notice file, and of the sockets of servers.
CONTROL, SERVERS = "control", "servers"


def notice_file(folder: Path) -> Path:
    """Return the machine's notice file in an agent's folder."""
    return folder / CONTROL / "notice"


class JoinedWorker(WorkerProcess):
    """A worker on a machine that joined.

    ``folder`` is the agent's. Without a sandbox in the ``terms``, it can do all that this user can
    do. ``fetch`` gets the code of the job, in a thread.
    """

    order: OrderView

    def __init__(
        self,
        order: OrderView,
        folder: Path,
        terms: Terms,
        heartbeat: float,
        fetch: Callable[[OrderView, Path], None],
    ) -> None:
        self._sandbox = terms.sandbox
        self._next_look = 0.0
        self._processors = terms.processors
        self._code = folder / "code"
        boxed = terms.sandbox is not None
        there = inside.SERVERS if boxed else folder / SERVERS
        threads = min(len(terms.processors), math.ceil(container_limits.processors()))
        env = {
            **terms.environment,
            **{name: value.replace(f"@{SOCKETS}/", f"@{there}/")
               for name, value in order.env.items()},
            "VCASGD_CACHE_DIR": str(inside.CODE if boxed else self._code),
            NOTICE_FILE_VARIABLE: str(
                inside.CONTROL / "notice" if boxed else notice_file(folder)
            ),
            "TMPDIR": str(inside.TEMPORARY if boxed else folder),
            **({"HOME": str(inside.HOME)} if boxed else {}),
            "VCASGD_HEARTBEAT": str(heartbeat),
            "OMP_NUM_THREADS": str(threads),
            # Threads that wait would otherwise take processors from the owner's work.
            "OMP_WAIT_POLICY": "PASSIVE",
        }  # fmt: skip
        super().__init__(order, folder, env)
        self._fetching = threading.Thread(target=self._fetch, args=(fetch,), daemon=True)
        self._fetching.start()

    def _fetch(self, fetch: Callable[[OrderView, Path], None]) -> None:
        try:
            fetch(self.order, self._code)
        except Exception as error:  # noqa: BLE001 - otherwise, it would start without its code
            self._error = f"its code can't be fetched: {error}"

    @property
    def ready(self) -> bool:
        """True once its code is there."""
        return not self._fetching.is_alive() and self._error is None

    def command(self, argv: Sequence[str]) -> list[str]:
        command = super().command(argv)
        if self._sandbox is None:
            return command
        package = self.order.package
        places = {inside.CONTROL: self._folder / CONTROL, inside.SERVERS: self._folder / SERVERS,
                  inside.CODE / package: self._code / package}  # fmt: skip
        # It is not a child of this process in there.
        return self._sandbox.command(command[: command.index("--parent")], places)

    def _start(self) -> subprocess.Popen[bytes] | ForkedCommand:
        process = super()._start()
        if self._sandbox is None and isinstance(process, subprocess.Popen):
            # It has no other threads yet.
            os.sched_setaffinity(process.pid, self._processors)
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        return process

    def enforce(self) -> None:
        """Kill the worker if it takes more memory than it may; keep it on its processors."""
        sandbox = self._sandbox
        if sandbox is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        super().enforce()
        processes = list(self._boxed())
        for process in processes:
            _keep_on(self._processors, process)
        # Memory that processes share counts for each of them in the first sum, which is quick.
        if _sum(processes, lambda each: each.memory_info().rss) <= sandbox.memory:
            return
        used = _sum(processes, lambda each: each.memory_full_info().pss)
        if used > sandbox.memory:
            self.kill()
            self._error = (
                f"it used {used / 1e9:.2f} GB of memory; its machine allows "
                f"{sandbox.memory / 1e9:.2f} GB (--max-memory)"
            )

    def terminate(self) -> None:
        """Send SIGTERM to the worker; bubblewrap would not pass it on."""
        boxed = list(self._boxed())
        if not boxed:
            super().terminate()
        for process in boxed:
            with suppress(psutil.Error):
                process.terminate()

    def _boxed(self) -> Iterator[psutil.Process]:
        """Return the processes in the sandbox, but for the first one, which is bubblewrap's own."""
        if self._sandbox is not None and isinstance(self._process, subprocess.Popen):
            with suppress(psutil.Error):
                yield from psutil.Process(self._process.pid).children(recursive=True)[1:]


def _sum(processes: Iterable[psutil.Process], memory: Callable[[psutil.Process], int]) -> int:
    """Return the memory of the processes that have not ended, in bytes."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += memory(process)
    return total


def _keep_on(processors: Sequence[int], process: psutil.Process) -> None:
    with suppress(OSError):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if not os.sched_getaffinity(int(task.name)) <= set(processors):
                os.sched_setaffinity(int(task.name), processors)
