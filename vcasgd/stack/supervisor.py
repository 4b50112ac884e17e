"""The supervisor: starts the parts, starts again those that die, stops all in order."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

from vcasgd.errors import StackError, VcasgdError
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.stack.child import Child
from vcasgd.stack.cleanup import destroy_instances, forget_instances, remove_scratch
from vcasgd.stack.layout import StackLayout
from vcasgd.stack.names import kind_of
from vcasgd.stack.parts import PARTS, make_parts
from vcasgd.stack.probes import redis_server
from vcasgd.stack.state import PartState, StackPhase, StackState

log = logging.getLogger(__name__)

#: a dead part is noticed within this time
TICK_SECONDS = 0.05
#: the stack has failed if it isn't ready by then: Ray and torch need most of a minute on a slow
#: machine, and minutes on one that is busy with other things
START_SECONDS = 300.0
#: the stack has failed if a part dies so often before all are ready
START_DEATHS = 3
#: the order of the end; machines go after those that would replace them, and nobody is to be
#: promoted at the end
STOP_ORDER = (
    "controller", "api", "instances", "head", "server", "sentinel", "tensors", "ledger",
)  # fmt: skip


class Supervisor:
    """Runs a stack from its start to its end, in the main thread of a process of its own."""

    def __init__(self, layout: StackLayout, names: Sequence[str] = PARTS) -> None:
        self._layout = layout
        self._home = layout.home
        self._names = names
        self._children: dict[str, Child] = {}
        self._stopping = False
        self._hurried = False
        self._state = StackState(
            phase=StackPhase.STARTING,
            supervisor=_myself(),
            api_url=layout.api_url,
            ports=dict(layout.ports),
            scratch=str(layout.scratch),
            store_nodes=layout.nodes,
            replicas=layout.replicas,
        )

    def run(self) -> int:
        """Until SIGTERM. Returns 0, or 1 if the stack did not start; nothing is left then."""
        signal.signal(signal.SIGTERM, self._on_signal)
        # from a terminal it reaches the guardian too, who passes it on as SIGTERM
        signal.signal(signal.SIGINT, lambda *_: None)
        phase = StackPhase.STOPPED
        try:
            self._write()
            self._check_external()
            self._bring_up()
            self._watch(lambda: False)
        except VcasgdError as error:
            log.error("%s", error)
            self._state, phase = self._state.with_error(error), StackPhase.FAILED
        finally:
            self._shut_down(phase)
        return int(phase is StackPhase.FAILED)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._hurried = self._stopping
        self._stopping = True

    def _check_external(self) -> None:
        """Servers that the user brings must be there, and such that we can use them."""
        for name in self._layout.urls.keys() - self._layout.servers.keys():
            if not redis_server(name, self._layout.urls[name])(time.time()):
                setting = f"VCASGD_{kind_of(name).upper()}_URL"
                raise StackError(
                    f"the {name} server does not answer",
                    remedy=f"check that it is up, and {setting}: a port that speaks TLS wants "
                    "rediss://",
                )

    def _bring_up(self) -> None:
        self._layout.temporary.mkdir(parents=True, exist_ok=True)
        parts = make_parts(self._layout, self._names)
        self._children = {part.name: Child(part, self._home) for part in parts}
        self._write()
        deadline = time.monotonic() + START_SECONDS
        self._watch(lambda: self._all_ready() or self._given_up(deadline))
        if not self._stopping:
            self._change(phase=StackPhase.READY)
            log.info("ready: %s", self._layout.api_url)

    def _watch(self, until: Callable[[], bool]) -> None:
        while not self._stopping and not until():
            if self._tend():
                self._write()
            else:
                time.sleep(TICK_SECONDS)

    def _tend(self) -> bool:
        changed = False
        for name, child in self._children.items():
            before = child.state
            may_start = all(self._children[need].state.ready for need in child.part.needs)
            if self._tend_one(child, may_start):
                changed = True
                _tell(name, before, child.state)
        return changed

    def _tend_one(self, child: Child, may_start: bool) -> bool:
        try:
            return child.tend(may_start)
        except VcasgdError as error:
            if self._state.phase is StackPhase.STARTING:
                raise
            # what worked once may work again, and the other parts go on meanwhile
            log.error("%s: %s", child.part.name, error)
            return False

    def _all_ready(self) -> bool:
        return all(child.state.ready for child in self._children.values())

    def _given_up(self, deadline: float) -> bool:
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
            if kind == "instances":
                self._end_instances(known=started)
            for name in self._children:
                if kind_of(name) == kind:
                    self._stop(name)
        remove_scratch(self._state)
        self._change(phase=last, supervisor=PartState())
        log.info("stopped")

    def _end_instances(self, *, known: bool) -> None:
        destroy_instances(self._home, self._layout.settings, self._children)
        if known:
            forget_instances(self._layout.urls["ledger"], self._layout.settings, self._children)

    def _stop(self, name: str) -> None:
        child = self._children[name]
        child.stop(0.0 if self._hurried else child.part.stop_seconds)
        self._write()

    def _change(self, **fields: object) -> None:
        self._state = replace(self._state, **fields)  # type: ignore[arg-type]
        self._write()

    def _write(self) -> None:
        states = {name: child.state for name, child in self._children.items()}
        self._state = replace(self._state, parts=states)
        try:
            self._state.write(self._home.path)
        except OSError as error:  # a full disk is no reason to stop training
            log.error("can't write stack.json: %s", error)


def _myself() -> PartState:
    process = Process.of(os.getpid())
    return PartState(process.pid, process.started, time.time(), ready=True)


def _tell(name: str, before: PartState, now: PartState) -> None:
    if now.ready:
        log.info("%s is ready after %.1f s", name, time.time() - now.started_at)
    elif now.pid:
        log.info("%s started, process %d", name, now.pid)
    else:
        log.warning("%s died, process %d", name, before.pid)
