"""Supervisor that starts the parts, restarts dead ones, and stops all in order."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

from vcasgd.controller import MAX_HAND_IN_SECONDS
from vcasgd.errors import StackError, VcasgdError
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.stack.child import Child
from vcasgd.stack.cleanup import KnownMachines, destroy_machines, remove_machines
from vcasgd.stack.home import PartState, StackPhase, StackState
from vcasgd.stack.layout import StackLayout, kind_of
from vcasgd.stack.parts import PARTS, make_parts, redis_server

log = logging.getLogger(__name__)

#: Seconds between two checks of the parts until all are ready, and afterwards. The end of a part
#: is noticed at once in any case.
TICK_SECONDS = 0.05
READY_TICK_SECONDS = 0.5
#: Seconds until the start fails. Ray and torch need most of a minute on a slow machine, and
#: minutes on a busy one.
START_SECONDS = 300.0
#: Deaths of one part until the start fails.
START_DEATHS = 3
#: Order of shutdown: what needs another part stops before it. Sentinels stop before the servers, so
#: that they promote no replica.
STOP_ORDER = tuple(reversed(PARTS))
#: What the shutdown does first.
HANDING_IN = (
    f"workers push what they have, and jobs are stored: at most {MAX_HAND_IN_SECONDS:.0f} s"
)
#: Machines stop before this part, and after the controller, which would replace them.
BELOW_MACHINES = "head"


class Supervisor:
    """Runner of a stack, from start to shutdown, in the main thread of its own process."""

    def __init__(self, layout: StackLayout, names: Sequence[str] = PARTS) -> None:
        self._layout = layout
        self._home = layout.home
        self._names = names
        self._children: dict[str, Child] = {}
        self._stopping = False
        self._kill_now = False
        self._state = StackState(
            phase=StackPhase.STARTING,
            supervisor=_own_process(),
            api_url=layout.api_url,
            ports=dict(layout.ports),
            scratch=str(layout.scratch),
            store_nodes=layout.nodes,
            replicas=layout.replicas,
        )

    def run(self) -> int:
        """Run until SIGTERM. Returns 0, or 1 if the stack did not start and was cleaned up."""
        self._signals, written = socket.socketpair()
        self._signals.setblocking(False)
        written.setblocking(False)
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_signal)
        # Ctrl-C also reaches the guardian, which forwards it as SIGTERM.
        signal.signal(signal.SIGINT, lambda *_: None)
        phase = StackPhase.STOPPED
        try:
            self._write()
            self._check_external()
            self._start_parts()
            self._watch(lambda: False)
        except VcasgdError as error:
            log.error("%s", error)
            self._state, phase = self._state.with_error(error), StackPhase.FAILED
        finally:
            self._shut_down(phase)
        return int(phase is StackPhase.FAILED)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._kill_now = self._stopping
        self._stopping = True

    def _check_external(self) -> None:
        """Raise an error if a server of the user does not answer or is not supported."""
        for name in self._layout.urls.keys() - self._layout.servers.keys():
            if not redis_server(name, self._layout.urls[name])(time.time()):
                setting = f"VCASGD_{kind_of(name).upper()}_URL"
                raise StackError(
                    f"the {name} server does not answer",
                    remedy=f"check the server and {setting}; a TLS port requires rediss://",
                )

    def _start_parts(self) -> None:
        self._layout.temporary.mkdir(parents=True, exist_ok=True)
        parts = make_parts(self._layout, self._names)
        self._children = {part.name: Child(part, self._home) for part in parts}
        self._write()
        deadline = time.monotonic() + START_SECONDS
        self._watch(lambda: self._all_ready() or self._check_start(deadline))
        if not self._stopping:
            self._change(phase=StackPhase.READY)
            log.info("ready: %s", self._layout.api_url)

    def _watch(self, until: Callable[[], bool]) -> None:
        while not self._stopping and not until():
            if self._update():
                self._write()
            else:
                ready = all(child.state.ready for child in self._children.values())
                self._pause(READY_TICK_SECONDS if ready else TICK_SECONDS)

    def _pause(self, seconds: float) -> None:
        """Wait, at most until a signal arrives: SIGTERM, or the end of a part."""
        if self._signals in select.select([self._signals], [], [], seconds)[0]:
            self._signals.recv(1 << 10)

    def _update(self) -> bool:
        changed = False
        self._home.limit_log("stack")
        for name, child in self._children.items():
            before = child.state
            may_start = all(self._children[need].state.ready for need in child.part.needs)
            if self._update_one(child, may_start):
                changed = True
                _log_change(name, before, child.state)
        return changed

    def _update_one(self, child: Child, may_start: bool) -> bool:
        try:
            return child.update(may_start)
        except VcasgdError as error:
            if self._state.phase is StackPhase.STARTING:
                raise
            # The part worked before, so retry; the other parts keep running.
            log.error("%s: %s", child.part.name, error)
            return False

    def _all_ready(self) -> bool:
        return all(child.state.ready for child in self._children.values())

    def _check_start(self, deadline: float) -> bool:
        for name, child in self._children.items():
            if child.deaths >= START_DEATHS:
                raise self._failure(name, f"died {child.deaths} times while starting")
        if time.monotonic() > deadline:
            name = next(name for name, child in self._children.items() if not child.state.ready)
            raise self._failure(name, f"was not ready within {START_SECONDS:.0f} s")
        return False

    def _failure(self, name: str, what: str) -> StackError:
        tail = self._home.log_tail(name)
        return StackError(
            f"{name} {what}; the end of its log:\n{tail}", remedy=f"see {self._home.log(name)}"
        )

    def _shut_down(self, last: StackPhase) -> None:
        started = last is not StackPhase.FAILED
        if started:
            self._change(phase=StackPhase.STOPPING)
        for kind in STOP_ORDER:
            if kind == "controller" and started:
                self._report(HANDING_IN)
            if kind == BELOW_MACHINES:
                self._stop_machines(in_ledger=started)
            for name in self._children:
                if kind_of(name) == kind:
                    self._stop(name)
        self._state.remove_scratch()
        self._change(phase=last, supervisor=PartState())
        log.info("stopped")

    def _stop_machines(self, *, in_ledger: bool) -> None:
        settings, ledger = self._layout.settings, self._layout.urls["ledger"]
        known = KnownMachines.read(self._home, ledger)
        self._change(known_machines=known.machines)
        unended = destroy_machines(
            self._home,
            settings,
            self._children,
            known=known,
            progress=self._report,
            give_up=lambda: self._kill_now,
        )
        self._change(machines_ended=not unended, doing="")
        if in_ledger:
            remove_machines(ledger, settings, self._children, unended)

    def _report(self, doing: str) -> None:
        log.info("%s", doing)
        self._change(doing=doing)

    def _stop(self, name: str) -> None:
        child = self._children[name]
        status = child.stop(0.0 if self._kill_now else child.part.stop_seconds)
        if status is not None:
            log.info("%s ended with status %d", name, status)
        self._write()

    def _change(self, **fields: object) -> None:
        self._state = replace(self._state, **fields)  # type: ignore[arg-type]
        self._write()

    def _write(self) -> None:
        states = {name: child.state for name, child in self._children.items()}
        self._state = replace(self._state, parts=states)
        try:
            self._state.write(self._home.path)
        except OSError as error:  # A full disk must not stop training.
            log.error("can't write stack.json: %s", error)


def _own_process() -> PartState:
    process = Process.of(os.getpid())
    return PartState(process.pid, process.started, time.time(), ready=True)


def _log_change(name: str, before: PartState, now: PartState) -> None:
    if now.ready:
        log.info("%s is ready after %.1f s", name, time.time() - now.started_at)
    elif now.pid:
        log.info("%s started, process %d", name, now.pid)
    else:
        log.warning("%s died, process %d", name, before.pid)
