"""When a worker leaves."""

from __future__ import annotations

import pytest

from vcasgd.fleet.notices import Notice, NoticeKind
from vcasgd.steady_time import steady_time
from vcasgd.store.ledger.leases import Renewal
from vcasgd.worker.departure import Departure, last_moment


def renewal(state: str = "running", leave: str = "") -> Renewal:
    return Renewal(state, leave, frozenset())


@pytest.mark.parametrize(
    ("answer", "reason", "over"),
    [
        (renewal(), "", False),
        (renewal("starting"), "", False),
        (renewal("a state of a newer version"), "", False),
        (renewal("paused"), "the job is paused", False),
        (renewal("succeeded"), "the job has ended", True),
        (renewal("gone"), "the job has ended", True),
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
    [(600.0, 0.0, False), (600.0, 700.0, True), (-1, 0, True), (None, 0, True)],
)
def test_a_notice_to_terminate_ends_the_work_in_time(
    seconds: float | None, push_seconds: float, leaves: bool
) -> None:
    departure = Departure(8.0, lambda: push_seconds)
    at = None if seconds is None else steady_time() + seconds
    departure.on_notice(Notice(NoticeKind.TERMINATE, at))

    assert departure.leave_if_due() is leaves
    assert departure.reason == ("notice of eviction" if leaves else "")


@pytest.mark.parametrize(("at", "left"), [(None, 8.0), (1.0, 0.5)], ids=["no time", "over"])
def test_a_last_push_has_a_moment(at: float | None, left: float) -> None:
    departure = Departure(8.0)
    departure.on_notice(Notice(NoticeKind.TERMINATE, at))

    departure.leave_if_due()

    assert departure.seconds_left() == left


def test_an_advised_worker_finishes_its_subtask_before_it_drains() -> None:
    departure = Departure(8.0)
    departure.on_notice(Notice(NoticeKind.REBALANCE, None))
    assert not departure.leave_if_due()

    departure.on_renewal(renewal(leave="drain"))

    assert departure.finishing
    assert not departure.leave_if_due()


def test_an_advised_worker_does_not_finish_for_ever() -> None:
    departure = Departure(0.0)
    departure.on_notice(Notice(NoticeKind.REBALANCE, None))

    for _ in range(2):
        departure.on_renewal(renewal(leave="drain"))

    assert departure.reason == "drain"
