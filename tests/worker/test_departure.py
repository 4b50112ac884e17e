"""When a worker leaves, and which leases it keeps until then."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from vcasgd.steady_time import steady_time
from vcasgd.store.ledger.leases import Lease, Renewal, WorkKind
from vcasgd.worker.departure import Departure, last_moment
from vcasgd.worker.held_leases import HeldLeases


@dataclass(frozen=True)
class Notice:
    kind: str
    at: float | None = None


def renewal(state: str = "running", leave: str = "") -> Renewal:
    return Renewal(state, leave, frozenset())


@pytest.mark.parametrize(
    ("answer", "reason", "over"),
    [
        (renewal(), "", False),
        (renewal("starting"), "", False),
        (renewal("a state of a newer version"), "", False),
        (renewal("paused"), "the job is paused", False),
        (renewal("succeeded"), "the job is succeeded", True),
        (renewal("gone"), "the job is gone", True),
        (renewal(leave="drain"), "drain", False),
        (renewal(leave="quarantine"), "quarantine", False),
        (renewal(leave="not cleared: eu-only"), "not cleared: eu-only", False),
    ],
)
def test_the_answer_to_a_heartbeat(answer: Renewal, reason: str, over: bool) -> None:
    departure = Departure(8.0)

    departure.on_renewal(answer)

    assert (departure.leave_if_due(), departure.reason) == (bool(reason), reason)
    assert departure.job_over is over


def test_the_first_reason_counts() -> None:
    departure = Departure(8.0)
    departure.leave("SIGTERM")
    departure.on_renewal(renewal("failed"))

    assert departure.reason == "SIGTERM"


@pytest.mark.parametrize(
    ("gone_at", "push_seconds", "leave_at"),
    [
        (None, 0.0, 1000.0),
        (1005.0, 0.0, 1004.0),
        (1005.0, 1.5, 1002.5),
        (1120.0, 0.4, 1116.0),
        # Too short, or over already: at once.
        (1005.0, 60.0, 944.0),
        (990.0, 0.0, 989.0),
    ],
)
def test_a_worker_trains_until_it_has_to_push(
    gone_at: float | None, push_seconds: float, leave_at: float
) -> None:
    assert last_moment(1000.0, gone_at, push_seconds) == pytest.approx(leave_at)


@pytest.mark.parametrize(
    ("seconds", "push_seconds", "leaves"),
    [(600.0, 0.0, False), (600.0, 700.0, True), (-1, 0, True)],
)
def test_a_notice_to_terminate_ends_the_work_in_time(
    seconds: float, push_seconds: float, leaves: bool
) -> None:
    departure = Departure(8.0, lambda: push_seconds)
    departure.on_notice(Notice("terminate", at=steady_time() + seconds))

    assert departure.leave_if_due() is leaves
    assert departure.reason == ("notice of eviction" if leaves else "")


def test_a_notice_without_a_time_ends_the_work_at_once() -> None:
    departure = Departure(8.0)
    departure.on_notice(Notice("terminate"))

    assert departure.leave_if_due()
    assert departure.seconds_left() == 8.0


def test_a_last_push_has_a_moment_even_if_the_time_is_over() -> None:
    departure = Departure(8.0)
    departure.on_notice(Notice("terminate", at=1.0))

    assert departure.seconds_left() == 0.5


def test_an_advised_worker_finishes_its_subtask_before_it_drains() -> None:
    departure = Departure(8.0)
    departure.on_notice(Notice("rebalance"))
    assert not departure.leave_if_due()

    departure.on_renewal(renewal(leave="drain"))

    assert departure.finishing
    assert not departure.leave_if_due()


def test_an_advised_worker_does_not_finish_for_ever() -> None:
    departure = Departure(0.0)
    departure.on_notice(Notice("rebalance"))

    for _ in range(2):
        departure.on_renewal(renewal(leave="drain"))

    assert departure.reason == "drain"


def train(number: int, token: int = 1) -> Lease:
    return Lease(WorkKind.TRAIN, number, token)


def held(*leases: Lease) -> HeldLeases:
    result = HeldLeases()
    for lease in leases:
        result.add(lease)
    return result


def test_applied_subtasks_are_dropped_and_rework_is_postponed() -> None:
    evaluation = Lease(WorkKind.EVALUATE, 1, 1)
    leases = held(train(0), train(1), train(2), train(3), evaluation)
    leases.current = train(3)

    leases.settle(rework={0}, unsettled={1})

    assert leases.all() == [train(0), train(1), train(3), evaluation]
    assert leases.is_postponed(train(0))
    leases.settle(rework=set(), unsettled={1})
    assert leases.has(train(0)), "it isn't trained again yet"


def test_a_postponed_lease_is_resumed_once_and_only_while_it_is_held() -> None:
    first = Lease(WorkKind.INITIALISE, 0, 1)
    leases = held(train(0), train(1), first)
    for lease in (train(0), train(1), first):
        leases.postpone(lease)
    leases.drop(train(0))

    assert leases.take_postponed(WorkKind.INITIALISE) == first
    assert leases.take_postponed() == train(1)
    assert leases.take_postponed() is None


def test_a_newer_lease_of_the_same_work_replaces_the_older_one() -> None:
    leases = held(train(0))
    leases.add(train(0, token=2))

    assert not leases.has(train(0))


@pytest.mark.parametrize(
    ("steps", "remaining"),
    [
        ([("add", 1), ("drop", 1)], []),
        ([("add", 1), ("drop", 2)], [1]),
        ([("add", 1), ("add", 2), ("drop", 1)], [2]),
        ([("add", 1), ("drop", 1), ("add", 2), ("drop", 1)], [2]),
        ([("add", 1), ("postpone", 1), ("add", 2), ("drop", 1)], [2]),
        ([("add", 1), ("postpone", 1), ("add", 2), ("settle", 2)], []),
        ([("add", 1), ("postpone", 1), ("settle", 1)], [1]),
        ([("drop", 1)], []),
    ],
)
def test_a_late_answer_about_a_lease_leaves_a_newer_one_of_its_work(
    steps: list[tuple[str, int]], remaining: list[int]
) -> None:
    leases = HeldLeases()
    for step, token in steps:
        if step == "settle":
            leases.settle(rework=(), unsettled=())
        else:
            getattr(leases, step)(train(0, token))

    assert leases.all() == [train(0, token) for token in remaining]


def test_unfinished_are_the_current_and_the_postponed_leases() -> None:
    leases = held(train(0), train(1), train(2))
    leases.current = train(0)
    leases.postpone(train(1))
    assert leases.unfinished() == [train(0), train(1)]

    assert leases.drop_current() == train(0)

    assert leases.unfinished() == [train(1)]
    assert leases.current is None
