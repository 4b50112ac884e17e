"""The leases that a worker holds."""

from __future__ import annotations

import pytest

from vcasgd.store.ledger.leases import Lease, WorkKind
from vcasgd.worker.leases import LeaseBook, LeaseState

WORKING, SETTLING, POSTPONED = LeaseState


def train(number: int, token: int = 1) -> Lease:
    return Lease(WorkKind.TRAIN, number, token)


def book_of(**states: LeaseState) -> LeaseBook:
    """Return a book with a lease of subtask 0 for ``a``, of 1 for ``b``, and so on."""
    book = LeaseBook()
    for number, state in enumerate(states.values()):
        book.start(train(number))
        if state is SETTLING:
            book.finish(train(number))
        if state is POSTPONED:
            book.postpone(train(number))
    return book


def test_applied_subtasks_are_dropped_and_rework_is_postponed() -> None:
    book = book_of(a=SETTLING, b=SETTLING, c=SETTLING, d=WORKING)

    book.settle(rework={0}, unsettled={1})

    states = [book.state(train(number)) for number in range(4)]
    assert states == [POSTPONED, SETTLING, None, WORKING]
    book.settle(rework=set(), unsettled={1})
    assert book.state(train(0)) is POSTPONED, "it isn't trained again yet"


def test_a_subtask_in_progress_with_a_lost_part_is_resumed() -> None:
    book = book_of(a=WORKING)

    book.settle(rework={0}, unsettled=set())
    book.finish(train(0))

    assert book.working is None
    assert book.resume() == train(0)
    assert book.working == train(0)


def test_a_postponed_lease_is_resumed_once_and_only_while_it_is_held() -> None:
    book, first = book_of(a=POSTPONED, b=POSTPONED), Lease(WorkKind.INITIALISE, 0, 1)
    book.start(first)
    book.postpone(first)
    book.drop(train(0))

    assert book.resume(WorkKind.INITIALISE) == first
    assert book.resume() == train(1)
    assert book.resume() is None


@pytest.mark.parametrize("state", LeaseState)
def test_a_late_answer_about_a_lease_leaves_a_newer_one_of_its_work(state: LeaseState) -> None:
    book, newer = book_of(a=state), train(0, token=2)
    book.start(newer)

    for change in (book.drop, book.postpone, book.finish):
        change(train(0))

    assert book.state(train(0)) is None
    assert book.state(newer) is WORKING


def test_a_lease_that_was_lost_does_not_come_back() -> None:
    book = book_of(a=WORKING)
    book.drop(train(0))

    book.postpone(train(0))
    book.finish(train(0))

    assert book.held() == []


def test_unfinished_leases_are_those_in_progress_and_postponed() -> None:
    book = book_of(a=SETTLING, b=POSTPONED, c=WORKING)

    assert book.held(WORKING, POSTPONED) == [train(1), train(2)]
    assert book.held() == [train(0), train(1), train(2)]
