"""Timelines of machines: spans, ends, and replacements."""

from __future__ import annotations

from support.fleet_records import machine

from vcasgd.controller.fleet.machine_timeline import (
    SPANS_KEPT,
    Sighting,
    advance,
    expired,
    lost_at,
)
from vcasgd.schemas.history import MachinePhase, SpanView, TimelineView

MACHINE = machine("i", 1.0, "local", price_per_hour=0.1, zone="z", machine_type="process")
B: MachinePhase = "booting"
R: MachinePhase = "running"
N: MachinePhase = "notice"
D: MachinePhase = "draining"
X: MachinePhase = "dead"


def shown(state: MachinePhase, since: float, until: float | None = None) -> TimelineView:
    """Return the timeline of a machine with one span."""
    span = SpanView(state=state, since=since, until=until)
    return TimelineView.model_validate({**vars(MACHINE), "machine": MACHINE.id, "spans": [span]})


def seen(phase: MachinePhase, launched_at: float = 1.0) -> Sighting:
    return MACHINE.model_copy(update={"launched_at": launched_at}), phase


def after(
    *observations: tuple[float, dict[str, Sighting], dict[str, str | None]],
) -> dict[str, TimelineView]:
    timelines: dict[str, TimelineView] = {}
    for now, sightings, ends in observations:
        timelines |= advance(timelines, sightings, ends, now)
    return timelines


def spans(timeline: TimelineView) -> list[tuple[MachinePhase, float, float | None]]:
    return [(each.state, each.since, each.until) for each in timeline.spans]


def test_killed_machine_is_lost_without_a_notice() -> None:
    timeline = after((2.0, {"i": seen(R)}, {}), (3.0, {}, {"i": None}))["i"]

    assert spans(timeline) == [(B, 1.0, 2.0), (R, 2.0, 3.0), (X, 3.0, None)]
    assert (timeline.reason, lost_at(timeline)) == ("lost without a notice", 3.0)


def test_machine_that_goes_to_another_job_is_not_dead_and_can_return() -> None:
    timeline = after((2.0, {"i": seen(R)}, {}), (3.0, {}, {}), (5.0, {}, {}))["i"]
    assert (spans(timeline)[-1], timeline.phase) == ((R, 2.0, 3.0), None)

    again = advance({"i": timeline}, {"i": seen(R)}, {}, 8.0)["i"]

    assert spans(again)[-2:] == [(R, 2.0, 3.0), (R, 8.0, None)]


def test_machine_of_another_job_starts_when_it_comes() -> None:
    timelines = advance({}, {"i": seen(R)}, {}, 300.0, known={"i"})

    assert spans(timelines["i"]) == [(R, 300.0, None)]


def test_machine_that_is_lost_in_another_job_is_not_lost_in_the_first() -> None:
    timelines = after((2.0, {"i": seen(R)}, {}))
    timelines |= advance(timelines, {}, {}, 3.0, elsewhere={"i": "other-1"})

    assert advance(timelines, {}, {"i": None}, 9.0) == {}

    timeline = timelines["i"]
    assert (timeline.given_to, timeline.lost, spans(timeline)[-1]) == ("other-1", False, (R, 2, 3))
    again = advance(timelines, {"i": seen(R)}, {}, 10.0)["i"]
    assert again.given_to is None


def test_machine_that_waits_before_another_job_takes_it_is_given_to_that_job() -> None:
    timelines = after((2.0, {"i": seen(R)}, {}), (3.0, {}, {}))

    given = advance(timelines, {}, {}, 5.0, elsewhere={"i": "other-1"})["i"]

    assert (given.given_to, spans(given)[-1]) == ("other-1", (R, 2.0, 3.0))


def test_machine_of_another_job_can_be_a_replacement() -> None:
    lost = after((100.0, {"a": seen(R)}, {}), (150.0, {}, {"a": None}))

    assert advance(lost, {"b": seen(R)}, {}, 151.0, known={"b"})["a"].replaced_by == "b"
    assert "a" not in advance(lost, {"b": seen(B, 480.0)}, {}, 481.0), "after a break"


def test_unchanged_timelines_are_not_returned() -> None:
    timelines = after((2.0, {"i": seen(R), "j": seen(R)}, {}), (3.0, {"i": seen(R)}, {"j": None}))

    assert advance(timelines, {"i": seen(R)}, {}, 4.0) == {}
    assert advance(timelines, {"i": seen(R)}, {"j": None}, 4.0) == {}


def test_replacements_are_assigned_in_order_of_the_losses() -> None:
    timelines = after(
        (2.0, {"a": seen(R), "b": seen(R), "c": seen(R)}, {}),
        (10.0, {"a": seen(R), "b": seen(N), "c": seen(R)}, {}),
        (11.0, {"a": seen(R), "b": seen(N)}, {"c": None}),
        (13.0, {"a": seen(R), "b": seen(N), "d": seen(B, 12.0), "e": seen(B, 12.5)}, {}),
        (15.0, {"a": seen(R), "f": seen(B, 14.5)}, {"b": None, "d": "idle", "e": "idle"}),
    )

    assert (timelines["b"].replaced_by, timelines["c"].replaced_by) == ("d", "e")
    assert timelines["a"].replaced_by is None
    # A machine launched before the loss or long after it replaces none, nor does a surplus one.
    assert not [timeline for timeline in timelines.values() if timeline.replaced_by == "f"]


def test_description_is_updated_when_more_is_known() -> None:
    unknown = MACHINE.model_copy(update={"zone": ""}), B

    timeline = after((2.0, {"i": unknown}, {}), (3.0, {"i": seen(B)}, {}))["i"]

    assert (timeline.zone, spans(timeline)) == ("z", [(B, 1.0, None)])


def test_number_of_spans_is_bounded() -> None:
    observations = [(2.0 + at, {"i": seen((R, D)[at % 2])}, {}) for at in range(200)]

    timeline = after(*observations)["i"]

    assert len(timeline.spans) == SPANS_KEPT
    assert timeline.phase == D


def test_machines_that_ended_first_expire_first() -> None:
    timelines = {
        "old": shown(X, 1.0),
        "older": shown(R, 0.0, 0.5),
        "new": shown(X, 9.0),
        "alive": shown(R, 0.0),
    }

    assert expired(timelines, 4) == []
    assert expired(timelines, 2) == ["older", "old"]
    assert expired(timelines, 0) == ["older", "old", "new"]
