"""Lanes of machines over time: spans, ends, and who takes whose place."""

from __future__ import annotations

import json
from dataclasses import replace

from vcasgd.controller.fleet.machine_timeline import (
    SPANS_KEPT,
    MachinePhase,
    MachineTimeline,
    Sight,
    Span,
    look,
    surplus,
)

BORN = MachineTimeline("local", "z", "process", spot=True, price_per_hour=0.1)
B, R, N, D, X = (
    MachinePhase.BOOTING,
    MachinePhase.RUNNING,
    MachinePhase.NOTICE,
    MachinePhase.DRAINING,
    MachinePhase.DEAD,
)


def sight(phase: MachinePhase, launched_at: float = 1.0) -> Sight:
    return Sight(BORN, phase, launched_at)


def after(
    *looks: tuple[float, dict[str, Sight], dict[str, str | None]],
) -> dict[str, MachineTimeline]:
    lanes: dict[str, MachineTimeline] = {}
    for now, seen, ends in looks:
        lanes |= look(lanes, seen, ends, now)
    return lanes


def spans(lane: MachineTimeline) -> list[tuple[MachinePhase, float, float | None]]:
    return [(each.state, each.since, each.until) for each in lane.spans]


def test_a_machine_boots_works_has_a_notice_and_dies() -> None:
    lane = after(
        (2.0, {"i": sight(B)}, {}),
        (3.0, {"i": sight(B)}, {}),
        (4.0, {"i": sight(R)}, {}),
        (6.0, {"i": sight(N)}, {}),
        (9.0, {}, {"i": None}),
    )["i"]

    assert spans(lane) == [(B, 1.0, 4.0), (R, 4.0, 6.0), (N, 6.0, 9.0), (X, 9.0, None)]
    assert (lane.reason, lane.lost, lane.lost_at) == ("evicted", True, 6.0)


def test_a_machine_that_is_killed() -> None:
    lane = after((2.0, {"i": sight(R)}, {}), (3.0, {}, {"i": None}))["i"]

    assert spans(lane) == [(B, 1.0, 2.0), (R, 2.0, 3.0), (X, 3.0, None)]
    assert (lane.reason, lane.lost_at) == ("gone without a notice", 3.0)


def test_a_machine_that_we_gave_up_is_no_loss() -> None:
    lane = after((2.0, {"i": sight(R)}, {}), (3.0, {"i": sight(D)}, {}), (4.0, {}, {"i": "idle"}))[
        "i"
    ]

    assert spans(lane)[-2:] == [(D, 3.0, 4.0), (X, 4.0, None)]
    assert (lane.reason, lane.lost, lane.lost_at) == ("idle", False, None)


def test_a_machine_that_goes_to_another_job_is_not_dead_and_may_come_back() -> None:
    lane = after((2.0, {"i": sight(R)}, {}), (3.0, {}, {}), (5.0, {}, {}))["i"]
    assert (spans(lane)[-1], lane.phase) == ((R, 2.0, 3.0), None)

    again = look({"i": lane}, {"i": sight(R)}, {}, 8.0)["i"]

    assert spans(again)[-2:] == [(R, 2.0, 3.0), (R, 8.0, None)]


def test_nothing_new_is_not_told() -> None:
    lanes = after((2.0, {"i": sight(R), "j": sight(R)}, {}), (3.0, {"i": sight(R)}, {"j": None}))

    assert look(lanes, {"i": sight(R)}, {}, 4.0) == {}
    assert look(lanes, {"i": sight(R)}, {"j": None}, 4.0) == {}


def test_replacements_take_the_places_in_order() -> None:
    lanes = after(
        (2.0, {"a": sight(R), "b": sight(R), "c": sight(R)}, {}),
        (10.0, {"a": sight(R), "b": sight(N), "c": sight(R)}, {}),
        (11.0, {"a": sight(R), "b": sight(N)}, {"c": None}),
        (13.0, {"a": sight(R), "b": sight(N), "d": sight(B, 12.0), "e": sight(B, 12.5)}, {}),
        (15.0, {"a": sight(R), "f": sight(B, 14.5)}, {"b": None, "d": "idle", "e": "idle"}),
    )

    assert (lanes["b"].replaced_by, lanes["c"].replaced_by) == ("d", "e")
    assert lanes["a"].replaced_by is None
    # what was there before the loss, what came long after it, and more than were lost: none
    assert not [lane for lane in lanes.values() if lane.replaced_by == "f"]


def test_a_machine_replaces_nobody_that_was_lost_later_or_long_before() -> None:
    lost = after((2.0, {"a": sight(R)}, {}), (100.0, {}, {"a": None}))

    assert "a" not in look(lost, {"b": sight(B, 50.0)}, {}, 101.0)
    assert "a" not in look(lost, {"b": sight(B, 5000.0)}, {}, 5001.0)
    assert look(lost, {"b": sight(B, 101.0)}, {}, 102.0)["a"].replaced_by == "b"


def test_what_becomes_known_of_a_machine_is_shown() -> None:
    unknown = Sight(replace(BORN, zone=""), B, 1.0)

    lane = after((2.0, {"i": unknown}, {}), (3.0, {"i": sight(B)}, {}))["i"]

    assert (lane.zone, spans(lane)) == ("z", [(B, 1.0, None)])


def test_lanes_travel_as_json() -> None:
    lane = after((2.0, {"i": sight(R)}, {}), (3.0, {}, {"i": None}))["i"]

    row = json.loads(json.dumps(lane.to_row()))

    assert MachineTimeline.from_row(row) == lane
    assert row["spans"][0] == {"state": "booting", "from": 1.0, "to": 2.0}


def test_what_flaps_does_not_grow() -> None:
    looks = [(2.0 + at, {"i": sight((R, D)[at % 2])}, {}) for at in range(200)]

    lane = after(*looks)["i"]

    assert len(lane.spans) == SPANS_KEPT
    assert lane.phase is D


def test_those_that_are_gone_for_longest_are_forgotten() -> None:
    lanes = {
        "old": replace(BORN, spans=(Span(X, 1.0),)),
        "older": replace(BORN, spans=(Span(R, 0.0, 0.5),)),
        "new": replace(BORN, spans=(Span(X, 9.0),)),
        "alive": replace(BORN, spans=(Span(R, 0.0),)),
    }

    assert surplus(lanes, 4) == []
    assert surplus(lanes, 2) == ["older", "old"]
    assert surplus(lanes, 0) == ["older", "old", "new"]
