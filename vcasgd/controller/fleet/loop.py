"""The controller's fleet loop: observe, decide, act."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from vcasgd.controller.fleet.act import MachineActuator, WorkerActuator
from vcasgd.controller.fleet.cloud_calls import BACKOFF_SECONDS
from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.controller.fleet.learners import Learners
from vcasgd.controller.fleet.observe import Observer
from vcasgd.controller.fleet.view import FleetView
from vcasgd.errors import FleetError, StoreUnavailable
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import Blame, Launch, StartWorker, StopWorker
from vcasgd.fleet.plan.decide import Plan, make_plan

log = logging.getLogger(__name__)

#: Seconds between two looks at machines while the loop waits for its next round.
LOOK_SECONDS = 0.5
#: Seconds between two calls of :meth:`FleetLoop.due` at least.
MIN_PAUSE = 0.05


class FleetLoop:
    """Keeps the machines. Every action can be executed twice, and every round can be cut off."""

    def __init__(self, fleet: Fleet) -> None:
        """If this controller no longer leads, the loop leaves the rest of a round."""
        self._fleet = fleet
        self._observer = Observer(fleet)
        self._machines = MachineActuator(fleet)
        self._workers = WorkerActuator(fleet)
        self._learners = Learners(fleet.ledger, fleet.beats, fleet.settings.heartbeat)
        self._view = FleetView(fleet)
        self._heartbeat = fleet.settings.heartbeat
        #: When the next round begins, by :func:`time.monotonic`.
        self._next_at = 0.0

    @property
    def pause(self) -> float:
        """Seconds until :meth:`due` is worth a call again."""
        longest = LOOK_SECONDS if self._observer.has_machines else float("inf")
        return max(MIN_PAUSE, min(longest, self._next_at - time.monotonic()))

    def due(self) -> bool:
        """Return True if it is time for the next round, or a machine was lost before.

        A job waits for the replacement, and heartbeats of large clusters are many seconds apart.
        Raises the errors of :meth:`round`.
        """
        if time.monotonic() >= self._next_at:
            return True
        return self._observer.has_machines and self._observer.lost_machines()

    def round(self) -> None:
        """Observe, decide, and act once.

        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost.
        """
        began, now = time.monotonic(), self._fleet.clock()
        self._next_at = began + self._heartbeat / 2
        self._follow_pools()
        self._machines.serve(self._fleet.control.requests())
        state = self._observer.observe(now, self._workers.successors)
        failed_boots = [*self._view.failed_boots(state), *self._fleet.cloud.take_lapsed()]
        self._view.release(state)
        self._fleet.pools.remember({one.pool for one in state.machines})
        # First what other machines wait for, and then what people read.
        plan = make_plan(state, now)
        self._act(plan, state)
        # Follows the plan, which decides about the first worker of each machine.
        stops, starts = self._learners.decide(state, self._fleet.workplaces.further, now)
        self._change_workers(stops, starts, state)
        self._workers.finish_leaving(state.draining)
        for blame in failed_boots:
            # The machine may only have been interrupted early: back off as after a refusal.
            self._machines.record_failed_boot(blame, BACKOFF_SECONDS)
        self._view.publish(state, plan.waiting)
        ended = time.monotonic()
        self._next_at = ended + next_round(state, self._heartbeat, ended - began)

    def _follow_pools(self) -> None:
        """Take over what was edited in the pools file."""
        pools, cloud = self._fleet.pools, self._fleet.cloud
        if pools.refresh():
            cloud.invalidate_offers()
        pools.forget(cloud.vacated())
        while pools.replaced:
            self._fleet.calls.retire(pools.replaced.pop())
        self._fleet.clearance.set_pools(pools.specs)

    def _act(self, plan: Plan, state: Observed) -> None:
        """Carry out a plan. The actions of a kind are one call where that is cheaper."""
        self._change_workers(plan.stops, [], state)
        if self._fleet.leads():
            self._machines.terminate(plan.ends)
        for blame in plan.blames:
            self._attempt(partial(self._machines.record_failed_boot, blame), blame)
        self._change_workers([], plan.starts, state)
        for launch in plan.launches:
            self._attempt(partial(self._machines.launch, launch, state), launch)

    def _change_workers(
        self, stops: Sequence[StopWorker], starts: Sequence[StartWorker], state: Observed
    ) -> None:
        if stops and self._fleet.leads():
            self._workers.stop(stops)
        if starts and self._fleet.leads():
            self._workers.start(starts, state)

    def _attempt(self, act: Callable[[], None], action: Blame | Launch) -> None:
        """Carry out one action, unless another controller leads meanwhile."""
        if not self._fleet.leads():
            return
        try:
            act()
        except FleetError as error:
            # The next round observes the outcome and decides again.
            log.warning("%s: %s", action, error)
        except StoreUnavailable:
            raise
        except Exception:
            # One action that can't be executed must not stop those for other jobs and machines.
            log.exception("%s", action)


def next_round(state: Observed, heartbeat: float, seconds: float) -> float:
    """Return the seconds until the next round, after one that took ``seconds``.

    A round can cost much with many machines, so it is only repeated early if it took little time.
    """
    if not state.jobs and not state.machines:
        return heartbeat
    if any(one.id not in state.nodes for one in state.staying()):
        # A machine that has joined gets its worker in the same round.
        return min(heartbeat / 2, max(heartbeat / 10, 4 * seconds))
    return heartbeat / 2
