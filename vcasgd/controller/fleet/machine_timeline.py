"""What each machine of a job did, and when: pure. Times are Unix seconds.

A *lane* is one machine: spans of states, one after the other, and which machine took its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

#: machines of one job that are remembered; those that are gone for longest are forgotten first
LANES_KEPT = 1000
#: spans of one machine; a state that flaps must not fill the ledger
SPANS_KEPT = 50
#: a machine that is launched later than this after a loss is no replacement of it
REPLACEMENT_SECONDS = 1800.0
#: clocks of clouds are not ours
CLOCK_SECONDS = 1.0


class MachinePhase(StrEnum):
    """``NOTICE``: its cloud is about to take it; ``DRAINING``: we gave it up; ``DEAD``: it is
    gone."""

    BOOTING = "booting"
    RUNNING = "running"
    NOTICE = "notice"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True)
class Span:
    """``until`` is ``None`` while it lasts."""

    state: MachinePhase
    since: float
    until: float | None = None


@dataclass(frozen=True)
class MachineTimeline:
    """One machine of a job."""

    pool: str
    zone: str
    instance_type: str
    spot: bool
    price_per_hour: float
    spans: tuple[Span, ...] = ()
    replaced_by: str | None = None
    reason: str | None = None
    """Why it is gone, or will be."""
    lost: bool = False
    """Not by our wish."""

    @property
    def phase(self) -> MachinePhase | None:
        """Now; ``None`` where it does nothing for the job any more."""
        return self.spans[-1].state if self.spans and self.spans[-1].until is None else None

    @property
    def lost_at(self) -> float | None:
        """Since when it is known that another one has to take its place."""
        told = (MachinePhase.NOTICE, MachinePhase.DEAD)
        return next((each.since for each in self.spans if self.lost and each.state in told), None)

    def to_row(self) -> dict[str, Any]:
        spans = [
            {"state": each.state.value, "from": each.since, "to": each.until} for each in self.spans
        ]
        return {**asdict(self), "spans": spans}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> MachineTimeline:
        spans = (
            Span(MachinePhase(each["state"]), each["from"], each["to"]) for each in row["spans"]
        )
        return cls(**{**row, "spans": tuple(spans)})


@dataclass(frozen=True)
class Sight:
    """A machine at one look, as far as it matters to one job."""

    lane: MachineTimeline
    """Without spans: what does not change."""
    phase: MachinePhase
    launched_at: float


def look(
    known: Mapping[str, MachineTimeline],
    seen: Mapping[str, Sight],
    ends: Mapping[str, str | None],
    now: float,
) -> dict[str, MachineTimeline]:
    """The lanes that changed. ``ends``: machines that are gone since the look before, and why we
    ended them (``None``: we did not); others that are not seen any more went to another job, or
    outlived theirs."""
    after = {name: _seen(known.get(name), sight, now) for name, sight in seen.items()}
    for name in known.keys() - seen.keys():
        lane = known[name]
        after[name] = _dead(lane, ends[name], now) if name in ends else _left(lane, now)
    newcomers = sorted(seen.keys() - known.keys(), key=lambda name: seen[name].launched_at)
    all_ = {**known, **after}
    for name in newcomers:
        replaced = _replaced_by(all_, name, seen[name].launched_at)
        if replaced is not None:
            all_[replaced] = replace(all_[replaced], replaced_by=name)
    return {name: lane for name, lane in all_.items() if known.get(name) != lane}


def surplus(lanes: Mapping[str, MachineTimeline], most: int = LANES_KEPT) -> list[str]:
    """Machines that are forgotten, so that there are no more than ``most``."""
    over = [name for name, lane in lanes.items() if lane.phase in (None, MachinePhase.DEAD)]
    over.sort(key=lambda name: _last(lanes[name]))
    return over[: max(0, len(lanes) - most)]


def _seen(lane: MachineTimeline | None, sight: Sight, now: float) -> MachineTimeline:
    lane = _described(lane, sight.lane)
    if sight.phase is MachinePhase.NOTICE:
        lane = replace(lane, reason="notice of eviction", lost=True)
    if lane.phase is sight.phase:
        return lane
    if not lane.spans and sight.phase is not MachinePhase.BOOTING:
        # it was up before anybody looked
        lane = replace(lane, spans=(Span(MachinePhase.BOOTING, sight.launched_at, now),))
    since = now if lane.spans else sight.launched_at
    return _with(lane, Span(sight.phase, since), now)


def _described(lane: MachineTimeline | None, present: MachineTimeline) -> MachineTimeline:
    """With what is known now: the zone and the price are often not, while it boots."""
    if lane is None:
        return present
    fixed = {name: getattr(lane, name) for name in ("spans", "replaced_by", "reason", "lost")}
    return replace(present, **fixed)


def _dead(lane: MachineTimeline, why: str | None, now: float) -> MachineTimeline:
    if lane.phase is MachinePhase.DEAD:
        return lane
    noticed = lane.phase is MachinePhase.NOTICE
    reason = why or ("evicted" if noticed else "gone without a notice")
    lost = lane.lost or why is None
    return replace(_with(lane, Span(MachinePhase.DEAD, now), now), reason=reason, lost=lost)


def _left(lane: MachineTimeline, now: float) -> MachineTimeline:
    if lane.phase in (None, MachinePhase.DEAD):
        return lane
    return replace(lane, spans=(*lane.spans[:-1], replace(lane.spans[-1], until=now)))


def _with(lane: MachineTimeline, span: Span, now: float) -> MachineTimeline:
    return replace(lane, spans=(*_left(lane, now).spans, span)[-SPANS_KEPT:])


def _replaced_by(
    lanes: Mapping[str, MachineTimeline], newcomer: str, launched_at: float
) -> str | None:
    """The machine that was lost first, has no successor yet, and was lost before the launch."""
    waiting: Iterable[tuple[float, str]] = (
        (lane.lost_at, name)
        for name, lane in lanes.items()
        if name != newcomer
        and lane.replaced_by is None
        and lane.lost_at is not None
        and -CLOCK_SECONDS <= launched_at - lane.lost_at <= REPLACEMENT_SECONDS
    )
    return min(waiting, default=(0.0, None))[1]


def _last(lane: MachineTimeline) -> float:
    return lane.spans[-1].since if lane.spans else 0.0
