"""Copies what a worker prints to the job's log, without hidden values."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from vcasgd.printable import masked
from vcasgd.store.ledger.jobs import Jobs

#: Most lines kept between two heartbeats; more are counted and dropped.
LINES_KEPT = 500
#: Most characters of a line; the rest is cut.
MAX_LINE_LENGTH = 2000


class LineCapture:
    """Buffers the lines that the process prints until :meth:`flush` sends them. Thread-safe."""

    def __init__(self, jobs: Jobs, job: str, worker: str) -> None:
        self._jobs = jobs
        self._job = job
        self._worker = worker
        self._lock = threading.Lock()
        self._lines: deque[str] = deque()
        self._dropped = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Capture standard output and standard error, which still get every line."""
        os.register_at_fork(after_in_child=self._forget)
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(before[0], self.add), _Tee(before[1], self.add)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before

    def _forget(self) -> None:
        # A thread that isn't in the fork may hold the lock.
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        with self._lock:
            if len(self._lines) < LINES_KEPT:
                self._lines.append(line[:MAX_LINE_LENGTH])
            else:
                self._dropped += 1

    def flush(self) -> None:
        """Send the lines. Raises :class:`~vcasgd.errors.StoreUnavailable`, and keeps them then."""
        with self._lock:
            lines, dropped = list(self._lines), self._dropped
        if not lines:
            return
        if dropped:
            lines.append(f"… {dropped} more lines were printed")
        self._jobs.add_logs(self._job, self._worker, lines)
        with self._lock:
            for _ in range(len(lines) - bool(dropped)):
                self._lines.popleft()
            self._dropped -= dropped


class _Tee:
    """A text stream that also passes on whole lines."""

    def __init__(self, stream: TextIO, add: Callable[[str], None]) -> None:
        self._stream = stream
        self._add = add
        self._rest = threading.local()

    def write(self, text: str) -> int:
        # Each thread has its own incomplete line, so threads don't tear one another's.
        *lines, rest = (getattr(self._rest, "text", "") + text).split("\n")
        self._rest.text = rest
        for line in lines:
            if line.strip():
                self._add(masked(line))
        return self._stream.write(masked(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
