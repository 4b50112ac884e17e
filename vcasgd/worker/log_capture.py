"""Copies what a worker prints and logs to the job's log, without hidden values.

Standard output and standard error are captured as text streams, and records of Python's
:mod:`logging` and :mod:`warnings` by a handler, which knows their levels.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from vcasgd.limits import LOG_BURST_LINES, LOG_LINE_BYTES, LOG_LINES_PER_SECOND
from vcasgd.logging import is_own
from vcasgd.printable import masked, printable
from vcasgd.store.ledger.events import NewLine
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.untrusted import LogLevel

#: Most lines kept between two heartbeats; more are counted and dropped.
LINES_KEPT = 500
#: Seconds after which the last state of a line without an end, such as a progress bar, is sent.
UNFINISHED_SECONDS = 10.0
#: Characters of a line without an end that are kept; more than are sent.
PART_LENGTH = 2 * LOG_LINE_BYTES


def cut(line: str, more: int = 0) -> str:
    """Return a line of at most :data:`LOG_LINE_BYTES`, which says how much was cut.

    ``more`` is the number of characters that were cut before.
    """
    start = line.encode(errors="replace")[:LOG_LINE_BYTES].decode(errors="ignore")
    more += len(line) - len(start)
    return f"{start} … {more:,} more characters" if more else line


class LineCapture:
    """Buffers the lines that the process prints until :meth:`flush` sends them. Thread-safe."""

    def __init__(
        self, jobs: Jobs, job: str, worker: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._jobs = jobs
        self._job = job
        self._worker = worker
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: deque[NewLine] = deque()
        self._dropped = 0
        #: Lines that may be sent now, and since when.
        self._allowance, self._allowed_at = float(LOG_BURST_LINES), clock()
        self._streams: list[_Tee] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Capture output, which still goes where it went before, and records of logging."""
        os.register_at_fork(after_in_child=self._forget)
        before = sys.stdout, sys.stderr
        sys.stdout = out = _Tee(before[0], "out", self)
        sys.stderr = err = _Tee(before[1], "err", self)
        self._streams = [out, err]
        streams = {id(before[0]): out, id(before[1]): err}
        streams |= {id(sys.__stdout__): out, id(sys.__stderr__): err}
        redirected = [each for each in _user_handlers() if id(each.stream) in streams]
        for each in redirected:
            each.setStream(streams[id(each.stream)])
        handler = _RecordHandler(self)
        logging.getLogger().addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(handler)
            sys.stdout, sys.stderr = before
            for each in redirected:
                each.setStream(each.stream.stream)
            for stream in self._streams:
                stream.finish()

    def _forget(self) -> None:
        # A thread that isn't in the fork may hold the lock.
        self._lock = threading.Lock()

    def add(self, text: str, level: LogLevel = "out", more: int = 0) -> None:
        """Add a line, if this worker may send so many.

        ``more`` is the number of characters that it lacks.
        """
        line = NewLine(time.time(), level, cut(printable(masked(text)), more))
        if not line.text.strip():
            return
        with self._lock:
            now = self._clock()
            earned = (now - self._allowed_at) * LOG_LINES_PER_SECOND
            self._allowance = min(float(LOG_BURST_LINES), self._allowance + earned)
            self._allowed_at = now
            if len(self._lines) < LINES_KEPT and self._allowance >= 1:
                self._allowance -= 1
                self._lines.append(line)
            else:
                self._dropped += 1

    def flush(self) -> None:
        """Send the lines. Raises :class:`~vcasgd.errors.StoreUnavailable`, and keeps them then."""
        for stream in self._streams:
            stream.send_unfinished(self._clock())
        with self._lock:
            lines, dropped = list(self._lines), self._dropped
        number = len(lines)
        if dropped:
            text = f"… {dropped:,} more lines were printed, which the log has no room for"
            lines.append(NewLine(time.time(), "warning", text))
        if not lines:
            return
        self._jobs.add_logs(self._job, self._worker, lines)
        with self._lock:
            for _ in range(number):
                self._lines.popleft()
            self._dropped -= dropped


@dataclass
class _Unfinished:
    """A line without an end, of one thread.

    ``more`` is the number of characters that were not kept, ``sent`` what was last passed on, and
    ``at`` when, or since when it waits.
    """

    text: str = ""
    more: int = 0
    sent: str = ""
    at: float | None = None

    def extend(self, added: str) -> None:
        """Append text. After a carriage return, it overwrites the line, as in a terminal."""
        state = self.text + added
        whole = state.rstrip("\r")
        if "\r" in whole:
            whole = whole.rpartition("\r")[2]
            self.more = 0
        self.more += max(0, len(whole) - PART_LENGTH)
        self.text = whole[:PART_LENGTH] + ("\r" if state.endswith("\r") else "")


class _Tee:
    """A text stream that also passes on whole lines."""

    def __init__(self, stream: TextIO, level: LogLevel, capture: LineCapture) -> None:
        self.stream = stream
        self._level = level
        self._capture = capture
        # Each thread has its own incomplete line, so threads don't tear one another's.
        self._parts: dict[int, _Unfinished] = {}

    def write(self, text: str) -> int:
        *lines, rest = text.split("\n")
        thread = threading.get_ident()
        part = self._parts.get(thread) or _Unfinished()
        for line in lines:
            part.extend(line)
            self._pass_on(part)
            part = _Unfinished()
        part.extend(rest)
        if part.text:
            self._parts[thread] = part
        else:
            self._parts.pop(thread, None)
        return self.stream.write(masked(text))

    def send_unfinished(self, now: float) -> None:
        """Pass on the lines that have had no end for a while, if they changed."""
        for part in list(self._parts.values()):
            if part.at is None:
                part.at = now
            elif now - part.at >= UNFINISHED_SECONDS:
                part.at = now
                self._pass_on(part)

    def finish(self) -> None:
        """Pass on the lines that have no end."""
        for part in list(self._parts.values()):
            self._pass_on(part)
        self._parts.clear()

    def _pass_on(self, part: _Unfinished) -> None:
        text = part.text.rstrip("\r")
        if text != part.sent:
            part.sent = text
            self._capture.add(text, self._level, part.more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_LEVELS: dict[int, LogLevel] = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
}
#: Logger of :mod:`warnings`; its name says less than the message.
_WARNINGS = "py.warnings"


class _RecordHandler(logging.Handler):
    """Passes on records of the user's code and its libraries, and warnings of the worker."""

    def __init__(self, capture: LineCapture) -> None:
        super().__init__()
        self._capture = capture

    def emit(self, record: logging.LogRecord) -> None:
        own = record.name.partition(".")[0] == "vcasgd"
        # What a handler of the user's writes is captured with its format.
        if (own and record.levelno < logging.WARNING) or _is_written(record.name):
            return
        level = _LEVELS.get(min(record.levelno // 10 * 10, logging.ERROR), "debug")
        text = self.format(record)
        if not own and record.name not in ("root", _WARNINGS):
            text = f"{record.name}: {text}"
        for line in text.splitlines():
            self._capture.add(line, level)


def _user_handlers() -> list[logging.StreamHandler[Any]]:
    """Return the handlers that something else than the worker has set up for a stream."""
    known = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(each for each in known if isinstance(each, logging.Logger))]
    return [
        handler
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and not is_own(handler)
    ]


def _is_written(name: str) -> bool:
    """Return True if a handler writes the records of a logger to a captured stream."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(isinstance(getattr(each, "stream", None), _Tee) for each in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
