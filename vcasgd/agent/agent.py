"""The agent's loop: join, run workers, leave; and its output for people."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.filesize import decimal
from rich.status import Status
from rich.text import Text

import vcasgd
from vcasgd.agent.availability import Terms
from vcasgd.agent.connection import AgentConnection, GatewayAddress, JoinToken, Tunnel
from vcasgd.agent.worker_process import SERVERS, JoinedWorker, notice_file
from vcasgd.client.problems import may_work_later
from vcasgd.errors import ApiError, NotFound, VersionDiffers
from vcasgd.fleet.notices import NoticeKind, write_notice
from vcasgd.local_files import temporary_folder
from vcasgd.machine.workers import WorkerSet
from vcasgd.schemas.joining import (
    MAX_REASON_LENGTH,
    JoinRequest,
    JoinView,
    OrderView,
    ReportBody,
    ReportView,
)
from vcasgd.steady_time import boot_time
from vcasgd.threads import Background, DaemonThreads

#: Seconds between two lines about the progress if the output is no terminal.
LINE_SECONDS = 60.0


class Display:
    """Prints to standard error. Without a terminal, the state is a line from time to time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = console.status("") if console.is_terminal else None
        self._printed_at = float("-inf")

    def event(self, text: str) -> None:
        self._console.print(f"{datetime.now().astimezone():%H:%M:%S} {_one_line(text)}")

    def state(self, text: str) -> None:
        """Show the present state."""
        if self._status is not None:
            self._status.start()
            self._status.update(Text(_one_line(text)))
        elif time.monotonic() - self._printed_at >= LINE_SECONDS:
            self._printed_at = time.monotonic()
            self.event(text)

    def close(self) -> None:
        """Remove the state."""
        if self._status is not None:
            self._status.stop()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def describe(orders: list[OrderView], sent: int, received: int) -> str:
    """Return the state of a machine's workers in one line."""
    if not orders:
        return "waiting for a job"
    parts = []
    for order in orders:
        progress = "" if order.progress is None else f" {order.progress:.0%}"
        samples = "" if not order.samples else f", {order.samples:,} samples here"
        parts.append(f"{order.name}{progress}{samples}, {order.doing or 'starting'}")
    return f"{'; '.join(parts)} (sent {decimal(sent)}, received {decimal(received)})"


#: Seconds that workers have to push and leave after a signal.
GRACE_SECONDS = 30.0
#: Seconds before a planned end at which workers get notice of it.
NOTICE_SECONDS = 20.0
#: Seconds between two looks at the workers.
POLL_SECONDS = 0.2
#: Seconds in which the stack learns that the machine leaves, before its workers do.
LEAVE_REPORT_SECONDS = 5.0
#: Seconds before joining again after the machine was removed, or while the stack doesn't answer.
REJOIN_SECONDS = 5.0


class LeaveSignals:
    """Signals to leave: the first one in good order, the second one at once.

    While ``at_once`` is set, there is nothing to leave, and the first one ends the process.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.count = 0
        #: Number of the last one.
        self.number = 0
        self._event = threading.Event()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        before = {each: signal.signal(each, self._on) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on(self, number: int, _frame: FrameType | None) -> None:
        self.count, self.number = self.count + 1, number
        self._event.set()
        if self.at_once:
            sys.exit()

    def wait(self, seconds: float) -> bool:
        """Wait for the first signal. Return True if it has come."""
        return self._event.wait(max(0.0, seconds))


@dataclass(frozen=True)
class Agent:
    """Takes part until a signal, the end of the schedule, or the end of the token."""

    gateway: GatewayAddress
    token: JoinToken
    machine: JoinRequest
    terms: Terms
    display: Display
    interrupts: LeaveSignals
    #: The same for each visit, so that a machine can join again if an answer was lost.
    secret: str = field(default_factory=secrets.token_hex, repr=False)

    def run(self) -> None:
        """Join whenever the schedule allows it.

        Raises :class:`ApiError` if the stack refuses this machine, and :class:`VersionDiffers` if
        it has another version, also if it has changed since.
        """
        joined_before, terms = False, self.terms
        self.interrupts.at_once = False
        while not self.interrupts.count and not terms.schedule.over(_now()):
            now = _now()
            if (start := terms.schedule.start(now)) > now:
                self.display.state(f"pauses until {start:%H:%M}")
                self.interrupts.wait(min((start - now).total_seconds(), REJOIN_SECONDS))
                continue
            if _seconds_until(terms.schedule.end(now)) <= NOTICE_SECONDS:
                # Too late to begin.
                self.interrupts.wait(POLL_SECONDS)
                continue
            if terms.owner is not None and terms.owner.is_recent:
                self.display.state("pauses, because somebody uses this machine")
                self.interrupts.wait(REJOIN_SECONDS)
                continue
            try:
                if not self._take_part():
                    return
                joined_before = True
            except ApiError as error:
                if not joined_before or not may_work_later(error) or terms.silence.too_long():
                    raise
                self.display.state(f"no answer: {error.message}")
            if not terms.schedule.over(_now()):
                self.interrupts.wait(REJOIN_SECONDS)

    def _take_part(self) -> bool:
        """Join, work, and leave. Return False if the stack wanted that."""
        connection = AgentConnection(self.gateway, self.token, self.secret)
        try:
            view = connection.join(self.machine)
            self.terms.silence.broken()
            self.display.event(f"joined as {view.machine}, pool {view.pool}: {self.machine}")
            with temporary_folder("vcasgd-join-") as folder:
                return Visit(self, connection, view, folder).run()
        finally:
            connection.close()


class Visit:
    """Time between joining and leaving."""

    def __init__(
        self, agent: Agent, connection: AgentConnection, view: JoinView, folder: Path
    ) -> None:
        self._terms, self._display = agent.terms, agent.display
        self._interrupts = agent.interrupts
        self._connection = connection
        self._view = view
        self._folder = folder
        self._end = agent.terms.schedule.end(_now())
        sockets = folder / SERVERS
        sockets.mkdir()
        self._tunnel = Tunnel(agent.gateway, agent.token.text, view.services, sockets)
        #: A report, which the workers are looked after beside.
        self._reports = Background[ReportView](DaemonThreads(1, "report"))
        self._workers = WorkerSet(self._make_worker)
        self._notice = notice_file(folder)
        self._notice.parent.mkdir(exist_ok=True)
        self._fetching = threading.Lock()
        self._removed = self._dismissed = False
        #: Version of the stack, once it is not that of this machine any more.
        self._other_version: str | None = None

    def run(self) -> bool:
        """Run workers until there is a reason to leave; then leave.

        Return False if the stack gave the reason. Raises :class:`VersionDiffers` after it left
        because the stack has another version now.
        """
        self._tunnel.start()
        try:
            self._tunnel.await_ready()
            reason, seconds = self._work()
            if not self._removed:
                self._leave(reason, seconds)
            if self._other_version is not None:
                raise VersionDiffers(reason, version=self._other_version)
            return not self._dismissed
        finally:
            self._workers.kill()
            self._tunnel.stop()

    def _work(self) -> tuple[str, float | None]:
        """Return why the machine leaves, and the seconds that workers have, if they are limited."""
        due, changed = 0.0, False
        while True:
            if self._interrupts.wait(POLL_SECONDS):
                return "interrupted", None
            if (left := _seconds_until(self._end)) <= NOTICE_SECONDS:
                return f"it is nearly {self._end:%H:%M}", max(0.0, left)
            if self._terms.owner is not None and self._terms.owner.is_recent:
                return "somebody uses this machine", None
            self._tunnel.check()
            changed = self._update() or changed
            if not self._reports.busy and (changed or boot_time() >= due):
                due, changed = boot_time() + self._view.period, False
                self._start_report()
            view = self._take_report()
            if view is not None and view.leave is not None:
                self._dismissed = True
                return view.leave, view.leave_by
            if view is not None and view.version not in ("", vcasgd.__version__):
                self._other_version = view.version
                return f"the stack has vcasgd {view.version} now", None
            if self._removed:
                return "", None
            if self._terms.silence.too_long():
                self._dismissed = True
                return "the stack doesn't answer any more", None

    def _update(self) -> bool:
        """Start workers that are ready. Return True if one has ended."""
        ended = self._workers.update()
        for worker in ended:
            if worker.failed:
                self._display.event(f"a worker of {worker.order.name} failed: {worker.ended}")
        return bool(ended)

    def _start_report(self, *, leaving: bool = False) -> None:
        workers = self._workers.report(MAX_REASON_LENGTH)
        body = ReportBody.model_validate({"workers": workers, "leaving": leaving})
        self._reports.start(lambda: self._connection.report(body))

    def _take_report(self, *, leaving: bool = False) -> ReportView | None:
        """Do what the answer to the report says. Return None while there is none."""
        try:
            view = self._reports.take()
        except NotFound:
            self._display.event("the stack has removed this machine")
            self._removed = True
            return None
        except ApiError as error:
            if not may_work_later(error):
                raise
            self._display.state(f"no answer, trying again: {error.message}")
            return None
        if view is None:
            return None
        self._terms.silence.broken()
        for order in self._workers.follow(view.orders, leaving=leaving):
            self._display.event(f"works for {order.name} ({order.job})")
        self._display.state(describe(view.orders, self._tunnel.sent, self._tunnel.received))
        return view

    def _make_worker(self, order: OrderView) -> JoinedWorker:
        heartbeat = self._view.heartbeat
        return JoinedWorker(order, self._folder, self._terms, heartbeat, self._fetch_code)

    def _fetch_code(self, order: OrderView, into: Path) -> None:
        """Fetch the code of a job; remove what no worker runs before. Raises like the connection.

        All code together is as large as a worker's files may be.
        """
        with self._fetching:
            if self._terms.sandbox is None:
                self._connection.fetch_code(order, into)
                return
            into.mkdir(exist_ok=True)
            used = {order.package, *(worker.order.package for worker in self._workers)}
            for folder in into.iterdir():
                if folder.name not in used:
                    shutil.rmtree(folder)
            taken = sum(each.stat().st_size for each in into.rglob("*"))
            self._connection.fetch_code(order, into, max(0, self._terms.sandbox.files - taken))

    # -- leaving -----------------------------------------------------------------------------------

    def _leave(self, reason: str, seconds: float | None) -> None:
        """Let the workers push what they have, and leave."""
        self._display.event(f"leaves: {reason}; Ctrl-C again to leave at once")
        signals = self._interrupts.count
        self._report_leaving()
        deadline = boot_time() + (GRACE_SECONDS if seconds is None else seconds)
        if seconds is None:
            self._workers.leave()
        else:
            write_notice(self._notice, NoticeKind.TERMINATE, seconds)
        asked_again = self._await_workers(deadline, lambda: self._interrupts.count > signals)
        if seconds is not None and not asked_again:
            # They may just have missed the notice.
            self._workers.leave()
            self._await_workers(boot_time() + GRACE_SECONDS / 3, lambda: False)
        late = self._workers.running
        self._workers.kill()
        with contextlib.suppress(ApiError):
            self._connection.leave()
        self._display.event(
            f"left before {', '.join(late)} could push" if late else "left in good order"
        )

    def _report_leaving(self) -> None:
        """Tell the stack that the machine leaves, if it answers soon."""
        deadline, told = boot_time() + LEAVE_REPORT_SECONDS, False
        while boot_time() < deadline and (self._reports.busy or not told):
            if not self._reports.busy:
                self._start_report(leaving=True)
                told = True
            with contextlib.suppress(ApiError):
                self._take_report(leaving=True)
            self._update()
            time.sleep(POLL_SECONDS / 10)

    def _await_workers(self, deadline: float, hurried: Callable[[], bool]) -> bool:
        """Wait for the workers' ends. Return True if a person did not want to wait."""
        while self._workers.running:
            if hurried():
                return True
            if boot_time() > deadline:
                return False
            self._update()
            time.sleep(POLL_SECONDS / 4)
        return False


def _seconds_until(end: datetime | None) -> float:
    return float("inf") if end is None else (end - _now()).total_seconds()


def _now() -> datetime:
    return datetime.now(UTC).astimezone()
