"""The threads beside the training: heartbeat, notices, and captured output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from support.waiting import await_truth

from vcasgd.errors import StoreUnavailable
from vcasgd.fleet.notices import Notice, NoticeKind
from vcasgd.store.ledger.leases import Lease, Leases, Renewal, WorkKind
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.worker.departure import NoticeWatch
from vcasgd.worker.leases import HeartbeatSender, LeaseBook, capacity

SUBTASKS = [Lease(WorkKind.TRAIN, number, 1) for number in range(2)]


@dataclass
class Ledger:
    """A ledger that records what it receives; the leases in ``lost`` have expired.

    ``before_answer`` is called between a renewal and its answer.
    """

    heartbeats: list[Any] = field(default_factory=list)
    held: list[Lease] = field(default_factory=list)
    lost: frozenset[str] = frozenset()
    failures: int = 0
    before_answer: Callable[[], None] = lambda: None

    def renew(self, heartbeat: Any, held: list[Lease]) -> Renewal:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("no answer")
        self.heartbeats.append(heartbeat)
        self.held = held
        self.before_answer()
        lost, self.lost = self.lost, frozenset()
        return Renewal("running", "", lost)


class Sender:
    """A heartbeat sender with a short period."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.book = LeaseBook()
        self.alive = True
        self.errors: list[Exception] = []
        self.leaving: str | None = None
        self.thread = HeartbeatSender(
            cast("Leases", self.ledger),
            self.book,
            period=0.01,
            describe=self.describe,
            alive=lambda: self.alive,
            on_renewal=lambda _renewal: None,
        )
        for lease in SUBTASKS:
            self.book.start(lease)

    def describe(self) -> Heartbeat:
        if self.errors:
            raise self.errors.pop()
        return Heartbeat(at=1.0, leaving=self.leaving)


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.thread.stop()


def test_a_heartbeat_renews_the_leases_and_drops_the_lost_ones(sender: Sender) -> None:
    sender.ledger.lost = frozenset({SUBTASKS[1].piece})
    sender.thread.start()

    await_truth(lambda: sender.book.held() == SUBTASKS[:1])
    assert sender.ledger.heartbeats[0]["at"] == 1.0


def test_a_late_answer_keeps_a_lease_that_was_acquired_meanwhile(sender: Sender) -> None:
    lost, again = SUBTASKS[1], replace(SUBTASKS[1], token=2)
    sender.ledger.lost = frozenset({lost.piece})

    def acquire_again() -> None:
        if sender.ledger.lost:
            sender.book.start(again)

    sender.ledger.before_answer = acquire_again

    sender.thread.start()

    await_truth(lambda: not sender.ledger.lost)
    sender.thread.stop()
    assert sender.book.held() == [SUBTASKS[0], again]


def test_a_worker_without_progress_renews_no_lease(sender: Sender) -> None:
    sender.alive = False
    sender.thread.start()

    await_truth(lambda: sender.ledger.heartbeats)
    assert sender.ledger.held == []


def test_the_heartbeat_survives_an_unexpected_error(sender: Sender) -> None:
    sender.errors = [TypeError("a bug")]
    sender.thread.start()

    await_truth(lambda: len(sender.ledger.heartbeats) >= 2)
    assert not sender.errors


@pytest.mark.parametrize("failures", [0, 2])
def test_the_last_heartbeat_is_sent_at_the_end_and_again_without_an_answer(
    sender: Sender, failures: int
) -> None:
    sender.thread.start()
    await_truth(lambda: sender.ledger.heartbeats)
    sender.ledger.failures, sender.leaving = failures, "the end"

    sender.thread.stop()

    assert sender.ledger.heartbeats[-1]["leaving"] == "the end"
    assert not sender.thread.is_alive()


def test_capacity_has_fields_of_a_heartbeat() -> None:
    heartbeat = Heartbeat(**capacity())

    assert heartbeat.cores
    assert heartbeat.memory_bytes
    assert heartbeat.memory_bytes >= (heartbeat.resident_bytes or 0) > 0


@dataclass
class Source:
    """A source of notices; an exception is raised."""

    answers: list[Notice | Exception | None]

    def poll(self) -> Notice | None:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_each_kind_of_notice_is_reported_once_despite_errors() -> None:
    rebalance, terminate = Notice(NoticeKind.REBALANCE, None), Notice(NoticeKind.TERMINATE, 5.0)
    source = Source([None, rebalance, rebalance, OSError("no answer"), terminate, rebalance])
    reported: list[Notice] = []
    watch = NoticeWatch(source, 0.001, reported.append)

    watch.start()

    await_truth(lambda: not watch.is_alive())
    assert reported == [rebalance, terminate]
