"""A worker's heartbeat: it renews leases, brings back what the job wants, and carries logs."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

from vcasgd.errors import StoreDenied, StoreError, StoreUnavailable
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases, Renewal

log = logging.getLogger(__name__)

#: lines kept between two heartbeats; more are counted and left out
LINES_KEPT = 500
LONGEST_LINE = 2000


class HeldLeases:
    """The leases that a worker holds; shared by the training thread and the heartbeat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Lease] = {}

    def add(self, lease: Lease) -> None:
        with self._lock:
            self._held[lease.piece] = lease

    def drop(self, piece: str) -> None:
        with self._lock:
            self._held.pop(piece, None)

    def has(self, lease: Lease) -> bool:
        with self._lock:
            return self._held.get(lease.piece) == lease

    def all(self) -> list[Lease]:
        with self._lock:
            return list(self._held.values())


class HeartbeatSender(threading.Thread):
    """Beats every ``period`` seconds until :meth:`stop`, at once when :meth:`hurry` is called.

    Leases are renewed only while ``alive()`` says that the training makes progress: a worker
    that hangs in the user's code loses its leases although this thread still runs.
    """

    def __init__(
        self,
        leases: Leases,
        held: HeldLeases,
        *,
        period: float,
        describe: Callable[[], dict[str, Any]],
        alive: Callable[[], bool],
        heard: Callable[[Renewal], None],
        flush_logs: Callable[[], None],
    ) -> None:
        super().__init__(name="heart", daemon=True)
        self._leases = leases
        self._held = held
        self._period = period
        self._describe = describe
        self._alive = alive
        self._heard = heard
        self._flush_logs = flush_logs
        self._wake = threading.Event()
        self._stopped = False
        self.last_answer = time.monotonic()

    def run(self) -> None:
        while not self._stopped:
            self._beat()
            self._wake.wait(self._period)
            self._wake.clear()

    def hurry(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread after a last beat, which tells what there is to tell."""
        self._stopped = True
        self._wake.set()
        self.join(timeout=5)
        self._beat()

    def _beat(self) -> None:
        held = self._held.all() if self._alive() else []
        try:
            renewal = self._leases.renew(self._describe(), held)
            self.last_answer = time.monotonic()
            for piece in renewal.lost:
                self._held.drop(piece)
            self._heard(renewal)
            self._flush_logs()
        except (StoreUnavailable, StoreDenied) as error:
            log.debug("heartbeat: %s", error)
        except StoreError:
            log.exception("heartbeat")


class NoticeLike(Protocol):
    """What a notice of eviction must tell."""

    @property
    def kind(self) -> str: ...

    @property
    def at(self) -> float | None: ...


class NoticePoll(Protocol):
    """Where notices come from; see :mod:`vcasgd.fleet.machine.notices`."""

    def poll(self) -> NoticeLike | None: ...


class NoticeWatch(threading.Thread):
    """Polls a source of notices until the first notice to terminate."""

    def __init__(
        self, source: NoticePoll, period: float, noticed: Callable[[NoticeLike], None]
    ) -> None:
        super().__init__(name="notices", daemon=True)
        self._source = source
        self._period = period
        self._noticed = noticed
        self._stopped = threading.Event()

    def run(self) -> None:
        told = None
        while not self._stopped.is_set():
            notice = self._poll()
            if notice is not None and notice.kind != told:
                told = notice.kind
                self._noticed(notice)
                if notice.kind == "terminate":
                    return
            self._stopped.wait(self._period)

    def stop(self) -> None:
        self._stopped.set()

    def _poll(self) -> NoticeLike | None:
        try:
            return self._source.poll()
        except Exception:
            log.exception("looking for a notice of eviction")
            return None


class LineCapture:
    """What the process prints, line by line, for the job's log; the original gets it too."""

    def __init__(self, jobs: Jobs, job: str, worker: str) -> None:
        self._jobs = jobs
        self._job = job
        self._worker = worker
        self._lock = threading.Lock()
        self._lines: deque[str] = deque()
        self._left_out = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Standard output and error go here as well."""
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(before[0], self.add), _Tee(before[1], self.add)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before

    def add(self, line: str) -> None:
        with self._lock:
            if len(self._lines) < LINES_KEPT:
                self._lines.append(line[:LONGEST_LINE])
            else:
                self._left_out += 1

    def flush(self) -> None:
        """Sends the lines. Raises :class:`StoreUnavailable` and keeps them then."""
        with self._lock:
            lines, left_out = list(self._lines), self._left_out
        if not lines:
            return
        if left_out:
            lines.append(f"… {left_out} more lines were printed")
        self._jobs.add_logs(self._job, self._worker, lines)
        with self._lock:
            for _ in range(len(lines) - bool(left_out)):
                self._lines.popleft()
            self._left_out -= left_out


class _Tee:
    """A text stream that hands on whole lines."""

    def __init__(self, stream: TextIO, add: Callable[[str], None]) -> None:
        self._stream = stream
        self._add = add
        self._rest = threading.local()

    def write(self, text: str) -> int:
        # a line belongs to the thread that prints it; threads must not tear each other's
        *lines, rest = (getattr(self._rest, "text", "") + text).split("\n")
        self._rest.text = rest
        for line in lines:
            if line.strip():
                self._add(line)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
