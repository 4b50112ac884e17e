"""The controller's fleet loop: observe, decide, act."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from vcasgd.cluster import Cluster
from vcasgd.controller.fleet.act import MachineActuator, WorkerActuator
from vcasgd.controller.fleet.clearance import ClearancePolicy
from vcasgd.controller.fleet.cloud_cache import CloudCache
from vcasgd.controller.fleet.cloud_calls import CloudCalls
from vcasgd.controller.fleet.costs import CostLedger
from vcasgd.controller.fleet.demands import Demands
from vcasgd.controller.fleet.events import FleetEvents
from vcasgd.controller.fleet.launch_history import BACKOFF_SECONDS, LaunchHistory
from vcasgd.controller.fleet.learners import Learners
from vcasgd.controller.fleet.machine_timeline import TimelineRecorder
from vcasgd.controller.fleet.observe import Observer
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.fleet.restart_backoff import RestartBackoff
from vcasgd.controller.fleet.speeds import Speeds
from vcasgd.controller.fleet.status import StatusPublisher
from vcasgd.controller.fleet.workplaces import Workplaces
from vcasgd.errors import FleetError, StoreUnavailable
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import Action, Blame, Launch, StartWorker, StopWorker, Terminate, make_plan
from vcasgd.logging import bound
from vcasgd.settings import Settings
from vcasgd.steady_time import steady_time
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import LostWorkers
from vcasgd.store.ledger.machines import JoinedMachines, WorkerOrders
from vcasgd.store.ledger.workers import WorkerBeats

log = logging.getLogger(__name__)

#: Heartbeats in which Ray reports a dead machine: three missed checks, of three heartbeats each.
LOST_HEARTBEATS = 10
#: Seconds between two looks at machines while the loop waits for its next round.
LOOK_SECONDS = 0.5
#: Seconds between two calls of :meth:`FleetLoop.due` at least.
MIN_PAUSE = 0.05


class FleetLoop:
    """Keeps the machines. Every action can be executed twice, and every round can be cut off."""

    def __init__(
        self,
        settings: Settings,
        ledger: RedisClient,
        pools: PoolRegistry,
        beats: WorkerBeats,
        connect: Callable[[], Cluster | None],
        leads: Callable[[], bool],
    ) -> None:
        """Raise :class:`~vcasgd.errors.StoreUnavailable` while the ledger is unavailable.

        ``connect`` returns a connection to Ray, or None while no pool needs one. ``leads`` is
        False when another controller may act; the rest of a round is then left to that one.
        """
        self._leads = leads
        jobs, self._control = Jobs(ledger), Control(ledger)
        costs, speeds = CostLedger(ledger), Speeds(ledger)
        restarts = RestartBackoff(jobs, LOST_HEARTBEATS * settings.heartbeat)
        launches, events = LaunchHistory(self._control), FleetEvents(self._control, jobs)
        self._pools, self._calls = pools, CloudCalls(leads)
        self._cloud = CloudCache(pools, self._calls, events.machines())
        self._clearance = ClearancePolicy(settings, ledger)
        lost = LostWorkers(ledger)
        self._workplaces = Workplaces(
            connect,
            JoinedMachines(ledger, settings.lease_seconds),
            WorkerOrders(ledger),
            restarts,
            lost,
        )
        self._observer = Observer(
            settings,
            jobs=jobs,
            beats=beats,
            demands=Demands(jobs, costs, self._clearance, speeds),
            tokens=ApiTokens(ledger),
            pools=pools,
            cloud=self._cloud,
            workplaces=self._workplaces,
            launches=launches,
            costs=costs,
            speeds=speeds,
        )
        self._machines = MachineActuator(
            settings,
            jobs=jobs,
            pools=pools,
            cloud=self._cloud,
            calls=self._calls,
            control=self._control,
            launches=launches,
            costs=costs,
            events=events,
        )
        self._workers = WorkerActuator(
            settings,
            jobs=jobs,
            workplaces=self._workplaces,
            clearance=self._clearance,
            restarts=restarts,
        )
        self._status = StatusPublisher(
            jobs=jobs,
            pools=pools,
            cloud=self._cloud,
            events=events,
            lost=lost,
            timeline=TimelineRecorder(ledger),
            ray_dir=settings.ray_dir,
        )
        self._learners = Learners(ledger, beats, settings.heartbeat)
        self._heartbeat = settings.heartbeat
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
        began, now = time.monotonic(), steady_time()
        self._next_at = began + self._heartbeat / 2
        if self._pools.refresh():
            self._cloud.invalidate_offers()
        self._pools.forget(self._cloud.vacated())
        while self._pools.replaced:
            self._calls.retire(self._pools.replaced.pop())
        self._clearance.set_pools(self._pools.specs)
        self._serve_requests()
        state = self._observer.observe(now, self._workers.successors)
        failed_boots = [*self._status.failed_boots(state), *self._cloud.take_lapsed()]
        self._status.release(state)
        self._pools.remember({one.pool for one in state.machines})
        # First what other machines wait for, and then what people read.
        plan = make_plan(state, now)
        self._act_all(plan.actions, state)
        # Follows the plan, which decides about the first worker of each machine.
        self._act_all(self._learners.decide(state, self._workplaces.further, now), state)
        self._workers.kill_lingering(state.draining)
        for blame in failed_boots:
            # The machine may only have been interrupted early: back off as after a refusal.
            self._machines.record_failed_boot(blame, BACKOFF_SECONDS)
        self._status.publish(state)
        self._status.publish_waiting(state, plan.waiting)
        ended = time.monotonic()
        self._next_at = ended + next_round(state, self._heartbeat, ended - began)

    def _serve_requests(self) -> None:
        """Execute what users requested through the API."""
        for request in self._control.take_requests():
            with bound(request=request.get("request")):
                if request["kind"] == "evict":
                    self._machines.evict(request)
                else:
                    kind = request["kind"]
                    self._control.finish(request, FleetError(f"unknown request {kind}"))

    def _act_all(self, actions: Sequence[Action], state: Observed) -> None:
        """Execute actions in order, those of a kind together where that is cheaper."""
        for kind, group in groupby(actions, type):
            if not self._leads():
                return
            if kind is StartWorker:
                self._workers.start(
                    [each for each in group if isinstance(each, StartWorker)], state
                )
            elif kind is StopWorker:
                self._workers.stop([each for each in group if isinstance(each, StopWorker)])
            elif kind is Terminate:
                self._machines.terminate([each for each in group if isinstance(each, Terminate)])
            else:
                for action in group:
                    # Clouds can take longer for an action than the leadership lasts.
                    if self._leads():
                        self._act(action, state)

    def _act(self, action: Action, state: Observed) -> None:
        try:
            match action:
                case Launch():
                    self._machines.launch(action, state)
                case Blame():
                    self._machines.record_failed_boot(action)
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
    if state.nodes is not None and any(one.id not in state.nodes for one in state.staying()):
        # A machine that has joined gets its worker in the same round.
        return min(heartbeat / 2, max(heartbeat / 10, 4 * seconds))
    return heartbeat / 2
