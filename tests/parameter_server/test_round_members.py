"""When a round ends."""

from __future__ import annotations

import pytest

from vcasgd.parameter_server.round_members import (
    GRACE_INTERVALS,
    MAX_GRACE,
    MIN_GRACE,
    RoundMembers,
)

INTERVAL = 2.0


def after_a_round_of(*workers: str) -> RoundMembers:
    members = RoundMembers()
    for worker in workers:
        members.arrive(worker, INTERVAL, 0.0)
    members.end()
    return members


def test_ends_when_all_have_arrived() -> None:
    members = after_a_round_of("a", "b")

    members.arrive("a", INTERVAL, 10.0)
    assert not members.complete(10.1)
    members.arrive("b", INTERVAL, 10.2)

    assert members.complete(10.2)


def test_a_lost_worker_costs_one_interval_once() -> None:
    members = after_a_round_of("a", "b")
    members.arrive("a", INTERVAL, 10.0)

    assert members.deadline == 10.0 + GRACE_INTERVALS * INTERVAL
    assert not members.complete(10.0 + INTERVAL)
    assert members.complete(13.0)
    members.end()
    members.arrive("a", INTERVAL, 14.0)

    assert members.complete(14.0)


def test_a_worker_that_is_known_to_be_lost_costs_nothing() -> None:
    members = after_a_round_of("a", "b")
    members.arrive("a", INTERVAL, 10.0)
    assert not members.complete(10.1)

    members.lose({"b", "c"})

    assert members.complete(10.1)
    # It was alive after all.
    members.arrive("b", INTERVAL, 10.2)
    members.end()
    members.arrive("a", INTERVAL, 12.0)
    assert not members.complete(12.1)


def test_a_late_worker_is_expected_again() -> None:
    members = after_a_round_of("a", "b")
    members.arrive("a", INTERVAL, 10.0)
    members.end()
    members.arrive("b", INTERVAL, 12.5)
    assert not members.complete(12.6)
    members.arrive("a", INTERVAL, 13.0)
    assert members.complete(13.0)
    members.end()

    members.arrive("a", INTERVAL, 15.0)

    assert not members.complete(15.1)


def test_the_first_round_waits_for_whoever_comes() -> None:
    members = RoundMembers()
    members.arrive("a", INTERVAL, 0.0)

    assert not members.complete(INTERVAL / 2)
    assert members.complete(GRACE_INTERVALS * INTERVAL)


def test_the_others_are_in_the_round_of_one_that_just_missed_theirs() -> None:
    # Given a round that ended just before a new worker's update
    members = after_a_round_of("a", "b")
    members.arrive("c", INTERVAL, 10.0)

    # When the others push the next time, an interval and a moment later
    later = 10.0 + INTERVAL + 0.05
    assert not members.complete(later)
    assert members.waiting_seconds(later) == pytest.approx(INTERVAL + 0.05)
    members.arrive("a", INTERVAL, later)
    members.arrive("b", INTERVAL, later)

    # Then all three are in one round
    assert members.complete(later)
    assert members.waiting_seconds(later) == 0.0


@pytest.mark.parametrize(
    ("seconds", "grace"), [(0.0, MIN_GRACE), (1.0, GRACE_INTERVALS), (1e9, MAX_GRACE)]
)
def test_the_wait_is_bounded(seconds: float, grace: float) -> None:
    members = after_a_round_of("a", "b")

    members.arrive("a", seconds, 100.0)

    assert members.deadline == 100.0 + grace


def test_an_empty_round_ends_nothing() -> None:
    members = after_a_round_of("a", "b")

    members.end()

    assert members.deadline is None
    assert members.complete(0.0)
    members.arrive("a", INTERVAL, 1.0)
    assert not members.complete(1.0)
