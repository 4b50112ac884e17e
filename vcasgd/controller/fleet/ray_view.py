"""View of the Ray cluster: its nodes and its workers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from vcasgd.cluster import ActorState, Cluster, WorkerState
from vcasgd.controller.fleet.joined import Workplaces
from vcasgd.controller.fleet.restart_backoff import RestartBackoff
from vcasgd.errors import ClusterError
from vcasgd.fleet.machine.notices import Notice
from vcasgd.fleet.observed import WorkerView
from vcasgd.logging import isolated
from vcasgd.settings import Settings
from vcasgd.store.ledger.lost_workers import LostWorkers
from vcasgd.worker_names import job_of, learner_of

log = logging.getLogger(__name__)

#: Seconds in which the controller must connect to Ray, also on a busy machine.
CONNECT_SECONDS = 120.0


class RayView:
    """The cluster as of the last :meth:`refresh`."""

    def __init__(
        self, connect: Callable[[], Workplaces], restarts: RestartBackoff, lost: LostWorkers
    ) -> None:
        self._connect = connect
        self._restarts = restarts
        self._lost = lost
        #: Workers that Ray lists as dead.
        self._dead: frozenset[str] = frozenset()
        self._cluster: Workplaces | None = None
        self._views: dict[str, WorkerView] = {}
        #: Machines whose node is alive.
        self.nodes: frozenset[str] = frozenset()
        #: The first worker of each machine, which the plan places.
        self.workers: tuple[WorkerView, ...] = ()
        #: The other workers of each machine, and whether each is alive.
        self.further: dict[str, bool] = {}
        #: Eviction notices that machines received, by machine.
        self.notices: dict[str, Notice] = {}

    @property
    def cluster(self) -> Workplaces:
        """The connection; available after the first refresh."""
        assert self._cluster is not None
        return self._cluster

    @property
    def alive(self) -> set[str]:
        """Names of all workers that are alive."""
        further = {name for name, alive in self.further.items() if alive}
        return further | {worker.name for worker in self.workers if worker.alive}

    def refresh(self) -> None:
        """Read nodes and workers, free the leases of workers that ended, and record the crashes of
        those whose machine is alive.

        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost.
        """
        before, nodes = self.alive, self._alive_nodes()
        states = self.cluster.workers()
        views = self._update(states)
        dead = frozenset(view.name for view in views if not view.alive)
        living = {view.name for view in views if view.alive}
        # An earlier controller may not have seen the end of those that are listed as dead.
        if lost := (before - living) | (dead - self._dead):
            self._report_lost(lost)
            # A machine that died between the two lists must be missing.
            nodes = self._alive_nodes()
        self._dead = dead
        self.nodes = nodes
        # Few names have a number at their end; an underscore is quickly found.
        further = {name for name in self._views if "_" in name and learner_of(name) > 1}
        self.workers = tuple(view for view in views if view.name not in further)
        self.further = {name: self._views[name].alive for name in further}
        for worker in self.workers:
            if not worker.alive and worker.name in before and worker.machine_id in nodes:
                with isolated(worker.job):
                    self._restarts.record_end(worker.name, worker.job, states[worker.name].reason)
        self._restarts.confirm(self.nodes)
        try:
            self.notices = self.cluster.notices()
        except ClusterError as error:
            # A notice is only a hint.
            log.warning("%s", error)

    def lost_nodes(self) -> bool:
        """Return True if a node is no longer alive that was at the last refresh.

        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost.
        """
        return not self.nodes <= self._alive_nodes()

    def _update(self, states: Mapping[str, WorkerState]) -> list[WorkerView]:
        """Return the views of all workers; most are those of the previous refresh."""
        before, self._views = self._views, {}
        for name, state in states.items():
            view, machine = before.get(name), state.machine_id or ""
            alive = state.state is not ActorState.DEAD
            if view is None or (view.machine_id, view.alive) != (machine, alive):
                view = WorkerView(name, job_of(name), machine, alive)
            self._views[name] = view
        return list(self._views.values())

    def _report_lost(self, workers: Iterable[str]) -> None:
        """Free the leases of workers whose process or node has ended."""
        by_job: defaultdict[str, list[str]] = defaultdict(list)
        for name in workers:
            by_job[job_of(name)].append(name)
        self._lost.report(by_job)

    def _alive_nodes(self) -> frozenset[str]:
        """Return the machines whose node is alive.

        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost.
        """
        if self._cluster is None:
            self._cluster = self._connect()
        nodes = (node.machine_id for node in self._cluster.nodes() if node.alive)
        return frozenset(node for node in nodes if node is not None)


def connect_ray(settings: Settings) -> Cluster:
    """Return a connection to Ray. Raises :class:`~vcasgd.errors.ClusterError`."""
    token = settings.ray_token
    return Cluster.connect(
        settings.required("ray_address"),
        settings.cluster,
        CONNECT_SECONDS,
        token.get_secret_value() if token else None,
        tls=settings.ray_tls,
    )
