"""The leases that a worker holds, what each is for now, and the heartbeats that renew them.

A heartbeat also reports the worker's status, and receives the job's state.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from enum import Enum, auto
from functools import cache
from typing import Any

import psutil

from vcasgd.container_limits import free_memory_bytes, memory_bytes, processors
from vcasgd.errors import StoreDenied, StoreFull, StoreUnavailable
from vcasgd.steady_time import steady_time
from vcasgd.store.ledger.leases import Lease, Leases, Renewal, WorkKind
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.threads import EssentialThread


class WorkInterrupted(Exception):
    """The current work ends early, and its lease is taken care of."""


class LeaseState(Enum):
    """State of a lease that the worker holds."""

    #: Its work is in progress; at most one lease is in this state.
    WORKING = auto()
    #: Its subtask is trained, and updates of it aren't applied yet.
    SETTLING = auto()
    #: Its work is to be resumed, from the position that it has then.
    POSTPONED = auto()


class LeaseBook:
    """Owned by the training thread; the heartbeat thread calls :meth:`held` and :meth:`drop`.

    A lease that was lost, returned, or is done isn't in the book.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By work item, of which a worker has one lease at a time.
        self._entries: dict[str, tuple[Lease, LeaseState]] = {}

    def start(self, lease: Lease) -> None:
        """Record that the work of a new lease begins."""
        with self._lock:
            self._entries[lease.piece] = lease, LeaseState.WORKING

    def finish(self, lease: Lease) -> None:
        """Record that a subtask is trained, unless a part of it has to be trained again."""
        self._move(lease, LeaseState.WORKING, LeaseState.SETTLING)

    def postpone(self, lease: Lease) -> None:
        """Record that the work of a lease is to be resumed, if it is held."""
        for state in LeaseState:
            self._move(lease, state, LeaseState.POSTPONED)

    def resume(self, only: WorkKind | None = None) -> Lease | None:
        """Begin the work of a postponed lease, of one kind if given; None if there is none."""
        for lease in self.held(LeaseState.POSTPONED):
            if only in (None, lease.kind) and self._move(
                lease, LeaseState.POSTPONED, LeaseState.WORKING
            ):
                return lease
        return None

    def drop(self, lease: Lease) -> None:
        """Record that a lease was lost, returned, or is done; a newer one of its work stays."""
        with self._lock:
            if self._entries.get(lease.piece, (None,))[0] == lease:
                del self._entries[lease.piece]

    def settle(self, rework: Collection[int], unsettled: Collection[int]) -> None:
        """Postpone the subtasks to ``rework``, and drop those that are completely applied.

        ``unsettled`` are the subtasks with updates whose outcome isn't known yet.
        """
        for lease in self.held():
            if lease.kind is not WorkKind.TRAIN:
                continue
            if lease.number in rework:
                self.postpone(lease)
            elif self.state(lease) is LeaseState.SETTLING and lease.number not in unsettled:
                self.drop(lease)

    # -- questions ---------------------------------------------------------------------------------

    def held(self, *states: LeaseState) -> list[Lease]:
        """Return the leases in one of the states; all without any."""
        with self._lock:
            entries = list(self._entries.values())
        return [lease for lease, state in entries if not states or state in states]

    def state(self, lease: Lease) -> LeaseState | None:
        """Return the state of a lease; None if it was lost, returned, or is done."""
        with self._lock:
            held, state = self._entries.get(lease.piece, (None, None))
        return state if held == lease else None

    @property
    def working(self) -> Lease | None:
        """The lease of the work in progress; None without one."""
        return next(iter(self.held(LeaseState.WORKING)), None)

    def _move(self, lease: Lease, before: LeaseState, after: LeaseState) -> bool:
        """Change the state of a lease if it is the one ``before``; return True if it was."""
        with self._lock:
            if self._entries.get(lease.piece) != (lease, before):
                return False
            self._entries[lease.piece] = lease, after
            return True


log = logging.getLogger(__name__)

#: Seconds for which the last heartbeat is tried, and those between two attempts.
STOP_SECONDS, RETRY_SECONDS = 5.0, 0.2


class WorkerStatus:
    """Progress of a worker: written by the training thread, read by the heartbeat, whose fields
    have the same names."""

    def __init__(self) -> None:
        #: The current activity, for people.
        self.doing = "starting"
        #: Local steps and samples since the process started.
        self.steps = 0
        self.samples = 0
        #: Processes of this worker that train together; None until the model is built.
        self.ranks: int | None = None
        #: Their GPUs, as CUDA_VISIBLE_DEVICES; None without one.
        self.visible_gpus: str | None = None
        #: Operations of the model for a sample, as the task says.
        self.flops_per_sample: float | None = None
        #: Median seconds of a local step over the last push intervals.
        self.step_seconds: float | None = None
        #: Local steps and the optimizer's momentum in the last push interval.
        self.local_steps: int | None = None
        self.momentum: float | None = None
        #: Name of an optimizer whose moments aren't those of the whole batch.
        self.uncorrected: str | None = None
        #: Index and reason of the newest samples that this worker skipped.
        self.bad_samples: dict[str, str] | None = None
        #: Start of the training that isn't submitted for a push yet, in Unix seconds.
        self.unpushed_since: float | None = None
        self._progress_at = time.monotonic()

    def on_step(self) -> None:
        self.steps += 1
        self.note_progress()

    def note_progress(self) -> None:
        """Record that the user's code isn't hanging: it made a step, or isn't running."""
        self._progress_at = time.monotonic()

    def makes_progress(self, stall_seconds: float) -> bool:
        """Return True if the last progress is less than ``stall_seconds`` ago."""
        return time.monotonic() - self._progress_at < stall_seconds


class HeartbeatSender(EssentialThread):
    """Thread that sends a heartbeat every ``period`` seconds until :meth:`stop`.

    Leases are renewed only while ``alive()`` is True: a worker that hangs in the user's code loses
    its leases although this thread still runs.
    """

    def __init__(
        self,
        leases: Leases,
        book: LeaseBook,
        *,
        period: float,
        describe: Callable[[], Heartbeat],
        alive: Callable[[], bool],
        on_renewal: Callable[[Renewal], None],
    ) -> None:
        super().__init__("heartbeat")
        self._leases = leases
        self._book = book
        self._period = period
        self._describe = describe
        self._alive = alive
        self._on_renewal = on_renewal
        self._wake = threading.Event()
        #: End of the attempts to send the last heartbeat, by :func:`time.monotonic`.
        self._stop_by: float | None = None
        #: Time of the ledger's last answer, by :func:`time.monotonic`.
        self.last_answer = time.monotonic()

    def work(self) -> None:
        """Send heartbeats until :meth:`stop`, and a last one then."""
        while True:
            stop_by = self._stop_by
            sent = self._beat()
            if stop_by is not None and (sent or time.monotonic() >= stop_by):
                return
            self._wake.wait(self._period if stop_by is None else RETRY_SECONDS)
            self._wake.clear()

    def send_now(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Send a last heartbeat, which says why the worker leaves, and end the thread.

        No other heartbeat can follow it, because the same thread sends it.
        """
        self._stop_by = time.monotonic() + STOP_SECONDS
        self._wake.set()
        self.join(timeout=2 * STOP_SECONDS)

    def _beat(self) -> bool:
        """Send a heartbeat. Returns False if the ledger didn't answer, so it may not have it."""
        held = self._book.held() if self._alive() else []
        try:
            renewal = self._leases.renew(self._description().model_dump(), held)
            self.last_answer = time.monotonic()
            for lease in held:
                if lease.piece in renewal.lost:
                    self._book.drop(lease)
            self._on_renewal(renewal)
        except StoreUnavailable as error:
            log.debug("heartbeat: %s", error)
            return False
        except (StoreDenied, StoreFull) as error:
            log.debug("heartbeat: %s", error)
        except Exception:
            # Without this thread the worker would lose all leases and never notice.
            log.exception("heartbeat")
        return True

    def _description(self) -> Heartbeat:
        """Return the worker's status, or only the time if that fails: leases must be renewed."""
        try:
            return self._describe()
        except Exception:
            log.exception("heartbeat")
            return Heartbeat(at=steady_time())


@cache
def _process(pid: int) -> psutil.Process:
    """Return the object that measures a process's use of processors between two calls."""
    return psutil.Process(pid)


def capacity() -> dict[str, Any]:
    """Return the fields of a :class:`Heartbeat` about memory, in bytes, and processors."""
    # A fork of a process has a PID of its own.
    process = _process(os.getpid())
    return {
        "resident_bytes": process.memory_info().rss,
        "cpu_percent": process.cpu_percent(),
        "memory_bytes": memory_bytes(),
        "memory_free_bytes": free_memory_bytes(),
        "cores": math.ceil(processors()),
    }
