"""Timelines of a job's machines: what each one did, and when. Times are Unix seconds.

:func:`advance` and :func:`expired` are pure; :class:`TimelineRecorder` applies them to what the
controller observes and writes the result to the ledger.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from vcasgd.fleet.observed import Observed
from vcasgd.logging import isolated
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.schemas.history import MachinePhase, SpanView, TimelineView
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


#: Fields that do not depend on time.
_DESCRIPTION = ("pool", "zone", "machine_type", "spot", "price_per_hour")


#: Machine of one job in one observation, and its phase.
Sighting = tuple[Machine, MachinePhase]


def advance(
    timelines: Mapping[str, TimelineView],
    sightings: Mapping[str, Sighting],
    ends: Mapping[str, str | None],
    now: float,
    *,
    known: Collection[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, TimelineView]:
    """Return the timelines that an observation changes or adds.

    ``ends`` maps each machine that disappeared since the previous observation to the controller's
    reason for terminating it, or to None if it did not. ``elsewhere`` maps machines to the other
    job that they are for now. ``known`` are those that were there before: one of them did not boot
    for this job.
    """
    after = {
        name: _seen(timelines.get(name), machine, phase, now, was_there=name in known)
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
    timelines: Mapping[str, TimelineView], newcomers: Mapping[str, TimelineView]
) -> dict[str, TimelineView]:
    """Return the lost machines that newcomers replace: the one lost first by the one that came
    first.
    """
    if not newcomers:
        return {}
    waiting = deque(
        sorted(
            (at, name)
            for name, each in timelines.items()
            if each.replaced_by is None and (at := lost_at(each)) is not None
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
            after[lost] = _changed(timelines[lost], replaced_by=name)
    return after


def lost_at(timeline: TimelineView) -> float | None:
    """Return the time since which a machine needs a replacement; None if it needs none."""
    ends = (each.since for each in timeline.spans if each.state in ("notice", "dead"))
    return next(ends, None) if timeline.lost else None


def expired(timelines: Mapping[str, TimelineView], most: int = TIMELINES_KEPT) -> list[str]:
    """Return the machines to delete so that at most ``most`` are left, if so many have ended."""
    over = [name for name, each in timelines.items() if each.phase in (None, "dead")]
    over.sort(key=lambda name: _last(timelines[name]))
    return over[: max(0, len(timelines) - most)]


class TimelineRecorder:
    """Writes the timelines of all active jobs; continues from the ledger after a restart."""

    def __init__(self, ledger: RedisClient) -> None:
        self._jobs = Jobs(ledger)
        self._timelines: dict[str, dict[str, TimelineView]] = {}

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
                self._timelines[job] = self._read(job)
        job_of = {name: job for job, machines in sightings.items() for name in machines}
        changed: dict[str, dict[str, TimelineView]] = {}
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
            changed[job] = {
                name: _row(_ended(timeline, why, now))
                for name, timeline in self._read(job).items()
                if name in names and timeline.phase
            }
        self._jobs.update_timelines(changed)

    def _read(self, job: str) -> dict[str, TimelineView]:
        return {
            name: TimelineView.model_validate({**row, "machine": name})
            for name, row in self._jobs.timelines(job).items()
        }

    def _update(self, changed: Mapping[str, Mapping[str, TimelineView]]) -> None:
        """Write changed timelines, by job and machine, and delete old ones."""
        if not changed:
            return
        after = {job: {**self._timelines[job], **timelines} for job, timelines in changed.items()}
        old = {job: expired(timelines) for job, timelines in after.items()}
        rows = {
            job: {name: _row(each) for name, each in timelines.items()}
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


def _row(timeline: TimelineView) -> dict[str, Any]:
    return timeline.model_dump(mode="json", by_alias=True, exclude={"machine"})


def _changed(timeline: TimelineView, **fields: Any) -> TimelineView:
    return timeline.model_copy(update=fields)


def _seen(
    timeline: TimelineView | None,
    machine: Machine,
    phase: MachinePhase,
    now: float,
    *,
    was_there: bool,
) -> TimelineView:
    """Return the timeline of a machine in a phase; ``was_there``: it didn't boot for this job."""
    timeline = _updated(timeline, machine)
    came = now if was_there else machine.launched_at
    if phase == "notice":
        timeline = _changed(timeline, reason="notice of eviction", lost=True)
    if timeline.phase == phase:
        return timeline
    if not timeline.spans and phase != "booting" and not was_there:
        # The machine finished booting before the first observation.
        timeline = _changed(timeline, spans=[_span("booting", came, now)])
    since = now if timeline.spans else came
    return _changed(_with_span(timeline, _span(phase, since), now), given_to=None)


def _updated(timeline: TimelineView | None, machine: Machine) -> TimelineView:
    """Return the timeline with the present description.

    The zone and the price of a machine are often unknown while it boots.
    """
    present = {name: getattr(machine, name) for name in _DESCRIPTION}
    if timeline is None:
        return TimelineView(machine=machine.id, **present)
    if all(getattr(timeline, name) == value for name, value in present.items()):
        return timeline
    return _changed(timeline, **present)


def _ended(timeline: TimelineView, why: str | None, now: float) -> TimelineView:
    if timeline.phase == "dead" or timeline.given_to is not None:
        return timeline
    reason = why or ("evicted" if timeline.phase == "notice" else "lost without a notice")
    dead = _with_span(timeline, _span("dead", now), now)
    return _changed(dead, reason=reason, lost=timeline.lost or why is None)


def _closed(timeline: TimelineView, now: float, given_to: str | None = None) -> TimelineView:
    """Return the timeline with its present span ended, because another job has the machine."""
    if timeline.given_to is None and timeline.phase != "dead":
        timeline = _changed(timeline, given_to=given_to)
    if timeline.phase in (None, "dead"):
        return timeline
    *before, last = timeline.spans
    return _changed(timeline, spans=[*before, last.model_copy(update={"until": now})])


def _with_span(timeline: TimelineView, span: SpanView, now: float) -> TimelineView:
    return _changed(timeline, spans=[*_closed(timeline, now).spans, span][-SPANS_KEPT:])


def _span(phase: MachinePhase, since: float, until: float | None = None) -> SpanView:
    return SpanView.model_validate({"state": phase, "since": since, "until": until})


def _last(timeline: TimelineView) -> float:
    return timeline.spans[-1].since if timeline.spans else 0.0


def _phase(one: Machine, *, joined: bool, draining: bool) -> MachinePhase:
    if one.state is MachineState.LEAVING and not one.leaves:
        return "notice"
    if draining or one.leaves:
        return "draining"
    return "running" if joined else "booting"
