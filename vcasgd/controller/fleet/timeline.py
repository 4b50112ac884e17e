"""Writes what each machine did for its job, and when, into the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from vcasgd.controller.fleet.machine_timeline import (
    MachinePhase,
    MachineTimeline,
    Sight,
    look,
    surplus,
)
from vcasgd.controller.fleet.names import worker_name
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.providers.base import Instance, InstanceState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs


class TimelineRecorder:
    """Of all active jobs; a restarted controller goes on where the ledger stands."""

    def __init__(self, ledger: RedisClient) -> None:
        self._jobs = Jobs(ledger)
        self._lanes: dict[str, dict[str, MachineTimeline]] = {}

    def look(self, state: Observed, ends: Mapping[str, str | None], now: float) -> None:
        """``ends``: machines that are gone since the look before, and why we ended them, ``None``
        where we did not. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        active = {demand.job for demand in state.jobs}
        seen = self._sights(state, active, ends)
        for job in active - self._lanes.keys():
            rows = self._jobs.timelines(job).items()
            self._lanes[job] = {name: MachineTimeline.from_row(row) for name, row in rows}
        for job, known in list(self._lanes.items()):
            self._update(job, look(known, seen[job], ends, now))
            if job not in active:
                del self._lanes[job]

    def _update(self, job: str, changed: dict[str, MachineTimeline]) -> None:
        if not changed:
            return
        lanes = {**self._lanes[job], **changed}
        gone = surplus(lanes)
        self._jobs.update_timelines(
            job, {name: lane.to_row() for name, lane in changed.items()}, gone
        )
        self._lanes[job] = {name: lane for name, lane in lanes.items() if name not in set(gone)}

    def _sights(
        self, state: Observed, active: set[str], ended: Mapping[str, str | None]
    ) -> defaultdict[str, dict[str, Sight]]:
        """By job: the machines that work for it, or are paid by it."""
        works_for = {each.instance_id: each.job for each in state.workers if each.alive}
        draining = {job: self._jobs.draining(job) for job in active}
        sights: defaultdict[str, dict[str, Sight]] = defaultdict(dict)
        for one in state.instances:
            job = works_for.get(one.id) or state.payers.get(one.id)
            if job in active and one.state is not InstanceState.GONE and one.id not in ended:
                leaves = worker_name(one.id, job) in draining[job]
                phase = _phase(one, up=_up(one, state), leaves=leaves)
                sights[job][one.id] = Sight(_lane(one), phase, one.launched_at)
        return sights


def _up(one: Instance, state: Observed) -> bool:
    if state.nodes is None:
        # nobody can tell, and a machine that works must not seem to boot again
        return one.state is not InstanceState.BOOTING
    return one.id in state.nodes or one.id in state.history.joined


def _phase(one: Instance, *, up: bool, leaves: bool) -> MachinePhase:
    if one.state is InstanceState.LEAVING:
        return MachinePhase.NOTICE
    if leaves:
        return MachinePhase.DRAINING
    return MachinePhase.RUNNING if up else MachinePhase.BOOTING


def _lane(one: Instance) -> MachineTimeline:
    return MachineTimeline(one.pool, one.zone, one.instance_type, one.spot, one.price_per_hour)
