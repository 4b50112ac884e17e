"""Timelines of a job's machines: what each one did, and when. Times are Unix seconds.

A timeline is a sequence of spans, each in one phase, and the machine that replaced this one.
:func:`advance` and :func:`expired` are pure; :class:`TimelineRecorder` applies them to what the
controller observes and writes the result to the ledger.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from vcasgd.fleet.observed import Observed
from vcasgd.logging import isolated
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker_names import worker_name

#: Machines of one job that the ledger keeps; those that ended first are deleted first.
TIMELINES_KEPT = 1000
#: Spans of one machine, so that a phase that flaps does not fill the ledger.
SPANS_KEPT = 50
#: Seconds after a loss in which a machine that comes counts as its replacement. It is ordered, or
#: taken from another job, as soon as the loss is known.
REPLACEMENT_SECONDS = 120.0
#: Seconds by which a cloud's clock can differ from ours.
CLOCK_SECONDS = 1.0


class MachinePhase(StrEnum):
    """Phase of a machine.

    ``NOTICE``: its cloud is about to take it. ``DRAINING``: the controller asked its worker to
    leave, or its owner the machine. ``DEAD``: it no longer exists.
    """

    BOOTING = "booting"
    RUNNING = "running"
    NOTICE = "notice"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True)
class Span:
    """Time in one phase; ``until`` is None for the present one."""

    state: MachinePhase
    since: float
    until: float | None = None


@dataclass(frozen=True)
class MachineTimeline:
    """Timeline of one machine of a job.

    ``reason`` says why it ended or is about to end. ``lost`` is true if the controller did not end
    it. ``given_to`` is the job that it went to; what happens to it there is not this job's loss.
    """

    pool: str
    zone: str
    machine_type: str
    spot: bool
    price_per_hour: float
    spans: tuple[Span, ...] = ()
    replaced_by: str | None = None
    reason: str | None = None
    lost: bool = False
    given_to: str | None = None

    @property
    def phase(self) -> MachinePhase | None:
        """The present phase; None if the machine no longer does anything for the job."""
        return self.spans[-1].state if self.spans and self.spans[-1].until is None else None

    @property
    def lost_at(self) -> float | None:
        """The time since which the machine needs a replacement; None if it needs none."""
        ending = (MachinePhase.NOTICE, MachinePhase.DEAD)
        return next((each.since for each in self.spans if self.lost and each.state in ending), None)

    def to_row(self) -> dict[str, Any]:
        """Return the timeline as JSON data for the ledger."""
        spans = [{"state": each.state, "from": each.since, "to": each.until} for each in self.spans]
        return {**vars(self), "spans": spans}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> MachineTimeline:
        """Return the timeline that :meth:`to_row` wrote."""
        spans = (
            Span(MachinePhase(each["state"]), each["from"], each["to"]) for each in row["spans"]
        )
        return cls(**{**row, "spans": tuple(spans)})


#: Fields that do not depend on time.
_DESCRIPTION = ("pool", "zone", "machine_type", "spot", "price_per_hour")


#: Machine of one job in one observation, and its phase.
Sighting = tuple[Machine, MachinePhase]


def advance(
    timelines: Mapping[str, MachineTimeline],
    sightings: Mapping[str, Sighting],
    ends: Mapping[str, str | None],
    now: float,
    *,
    known: Collection[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, MachineTimeline]:
    """Return the timelines that an observation changes or adds.

    ``ends`` maps each machine that disappeared since the previous observation to the controller's
    reason for terminating it, or to None if it did not. ``elsewhere`` maps machines to the other
    job that they are for now. ``known`` are those that were there before: one of them did not boot
    for this job.
    """
    after = {
        name: _seen(timelines.get(name), machine, phase, now, booted=name in known)
        for name, (machine, phase) in sightings.items()
    }
    for name in timelines.keys() - sightings.keys():
        timeline = timelines[name]
        if name in ends:
            after[name] = _ended(timeline, ends[name], now)
        else:
            after[name] = _closed(timeline, now, elsewhere.get(name))
    newcomers = {name: after[name] for name in sightings.keys() - timelines.keys()}
    after |= _replaced({**timelines, **after}, newcomers)
    return {
        name: each
        for name, each in after.items()
        if (before := timelines.get(name)) is not each and before != each
    }


def _replaced(
    timelines: Mapping[str, MachineTimeline], newcomers: Mapping[str, MachineTimeline]
) -> dict[str, MachineTimeline]:
    """Return the lost machines that newcomers replace: the one lost first by the one that came
    first.
    """
    if not newcomers:
        return {}
    waiting = deque(
        sorted(
            (each.lost_at, name)
            for name, each in timelines.items()
            if each.replaced_by is None and each.lost_at is not None
        )
    )
    after = {}
    for came, name in sorted((each.spans[0].since, name) for name, each in newcomers.items()):
        while waiting and waiting[0][0] < came - REPLACEMENT_SECONDS:
            waiting.popleft()
        first = 1 if waiting and waiting[0][1] == name else 0  # None replaces itself.
        if len(waiting) > first and waiting[first][0] <= came + CLOCK_SECONDS:
            _, lost = waiting[first]
            del waiting[first]
            after[lost] = replace(timelines[lost], replaced_by=name)
    return after


def expired(timelines: Mapping[str, MachineTimeline], most: int = TIMELINES_KEPT) -> list[str]:
    """Return the machines to delete so that at most ``most`` are left, if so many have ended."""
    over = [name for name, each in timelines.items() if each.phase in (None, MachinePhase.DEAD)]
    over.sort(key=lambda name: _last(timelines[name]))
    return over[: max(0, len(timelines) - most)]


class TimelineRecorder:
    """Writes the timelines of all active jobs; continues from the ledger after a restart."""

    def __init__(self, ledger: RedisClient) -> None:
        self._jobs = Jobs(ledger)
        self._timelines: dict[str, dict[str, MachineTimeline]] = {}

    def record(
        self,
        state: Observed,
        ends: Mapping[str, str | None],
        now: float,
        known: Collection[str] = (),
    ) -> None:
        """Advance all timelines by one observation; ``ends`` and ``known`` as for :func:`advance`.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        active = {demand.job for demand in state.jobs}
        sightings = self._sightings(state, active, ends)
        for job in active - self._timelines.keys():
            with isolated(job):
                rows = self._jobs.timelines(job).items()
                self._timelines[job] = {name: MachineTimeline.from_row(row) for name, row in rows}
        job_of = {name: job for job, machines in sightings.items() for name in machines}
        changed: dict[str, dict[str, MachineTimeline]] = {}
        for job, timelines in self._timelines.items():
            with isolated(job):
                seen = sightings[job]
                changed[job] = advance(timelines, seen, ends, now, known=known, elsewhere=job_of)
        self._update({job: timelines for job, timelines in changed.items() if timelines})
        self._timelines = {job: each for job, each in self._timelines.items() if job in active}

    def end(self, machines: Mapping[str, Collection[str]], why: str, now: float) -> None:
        """End the timelines of machines, by job, that something else than a controller ended.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        changed = {}
        for job, names in machines.items():
            rows = self._jobs.timelines(job)
            ended = {
                name: _ended(timeline, why, now)
                for name in names & rows.keys()
                if (timeline := MachineTimeline.from_row(rows[name])).phase
            }
            changed[job] = {name: each.to_row() for name, each in ended.items()}
        self._jobs.update_timelines(changed)

    def _update(self, changed: Mapping[str, Mapping[str, MachineTimeline]]) -> None:
        """Write changed timelines, by job and machine, and delete old ones."""
        if not changed:
            return
        after = {job: {**self._timelines[job], **timelines} for job, timelines in changed.items()}
        old = {job: expired(timelines) for job, timelines in after.items()}
        rows = {
            job: {name: each.to_row() for name, each in timelines.items()}
            for job, timelines in changed.items()
        }
        self._jobs.update_timelines(rows, old)
        for job, names in old.items():
            for name in names:
                del after[job][name]
        self._timelines |= after

    def _sightings(
        self, state: Observed, active: set[str], ends: Mapping[str, str | None]
    ) -> defaultdict[str, dict[str, Sighting]]:
        """Return, by job, the machines that work for it or that it pays for."""
        works_for = {each.machine_id: each.job for each in state.workers if each.alive}
        sightings: defaultdict[str, dict[str, Sighting]] = defaultdict(dict)
        for one in state.machines:
            job = works_for.get(one.id) or state.payers.get(one.id)
            if job in active and one.state is not MachineState.GONE and one.id not in ends:
                leaving = bool(state.draining) and worker_name(one.id, job) in state.draining
                joined = one.id in state.nodes or one.id in state.history.joined
                phase = _phase(one, joined=joined, draining=leaving)
                sightings[job][one.id] = one, phase
        return sightings


def _seen(
    timeline: MachineTimeline | None,
    machine: Machine,
    phase: MachinePhase,
    now: float,
    *,
    booted: bool,
) -> MachineTimeline:
    timeline = _updated(timeline, machine)
    came = now if booted else machine.launched_at
    if phase is MachinePhase.NOTICE:
        timeline = replace(timeline, reason="notice of eviction", lost=True)
    if timeline.phase is phase:
        return timeline
    if not timeline.spans and phase is not MachinePhase.BOOTING and not booted:
        # The machine finished booting before the first observation.
        timeline = replace(timeline, spans=(Span(MachinePhase.BOOTING, came, now),))
    since = now if timeline.spans else came
    return replace(_with_span(timeline, Span(phase, since), now), given_to=None)


def _updated(timeline: MachineTimeline | None, machine: Machine) -> MachineTimeline:
    """Return the timeline with the present description.

    The zone and the price of a machine are often unknown while it boots.
    """
    present = {name: getattr(machine, name) for name in _DESCRIPTION}
    if timeline is None:
        return MachineTimeline(**present)
    if all(getattr(timeline, name) == value for name, value in present.items()):
        return timeline
    return replace(timeline, **present)


def _ended(timeline: MachineTimeline, why: str | None, now: float) -> MachineTimeline:
    if timeline.phase is MachinePhase.DEAD or timeline.given_to is not None:
        return timeline
    noticed = timeline.phase is MachinePhase.NOTICE
    reason = why or ("evicted" if noticed else "lost without a notice")
    lost = timeline.lost or why is None
    dead = _with_span(timeline, Span(MachinePhase.DEAD, now), now)
    return replace(dead, reason=reason, lost=lost)


def _closed(timeline: MachineTimeline, now: float, given_to: str | None = None) -> MachineTimeline:
    """Return the timeline with its present span ended, because another job has the machine."""
    if timeline.given_to is None and timeline.phase is not MachinePhase.DEAD:
        timeline = replace(timeline, given_to=given_to)
    if timeline.phase in (None, MachinePhase.DEAD):
        return timeline
    return replace(timeline, spans=(*timeline.spans[:-1], replace(timeline.spans[-1], until=now)))


def _with_span(timeline: MachineTimeline, span: Span, now: float) -> MachineTimeline:
    return replace(timeline, spans=(*_closed(timeline, now).spans, span)[-SPANS_KEPT:])


def _last(timeline: MachineTimeline) -> float:
    return timeline.spans[-1].since if timeline.spans else 0.0


def _phase(one: Machine, *, joined: bool, draining: bool) -> MachinePhase:
    if one.state is MachineState.LEAVING and not one.leaves:
        return MachinePhase.NOTICE
    if draining or one.leaves:
        return MachinePhase.DRAINING
    return MachinePhase.RUNNING if joined else MachinePhase.BOOTING
