"""Bookkeeping of a worker's unapplied updates, without servers and threads."""

from __future__ import annotations

import pytest

from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.updates import UpdateStatus
from vcasgd.worker.pending_updates import DELAYS_KEPT, PendingUpdate, PendingUpdates, PushState

SUBTASK, EPOCH, SIZE = 3, 0, 10
PAYLOAD = memoryview(b"12345678")


def add(pending: PendingUpdates, start: int, stop: int, token: int = 1) -> PendingUpdate:
    """Add an update and return it."""
    header = Header(
        update=f"w.1.{start}", worker="w", subtask=SUBTASK, start=start, stop=stop, base=0,
        token=token, codec="float32", size=len(PAYLOAD), layout="l",
    )  # fmt: skip
    pending.add(header, EPOCH, PAYLOAD)
    return pending._updates[-1]


def push(pending: PendingUpdates, start: int, stop: int) -> PendingUpdate:
    """Add an update that the server accepts."""
    update = add(pending, start, stop)
    pending.on_accepted(update)
    return update


def report(
    pending: PendingUpdates, *fates: str, version: tuple[int, int] = (5, 1), safe: int = 99
) -> None:
    """Record the server's answer about all sent updates."""
    pending.on_status(pending.all_sent(), UpdateStatus(version, safe, list(fates)))


def test_updates_are_sent_in_the_order_of_submission() -> None:
    pending = PendingUpdates()
    first, second = add(pending, 0, 2), add(pending, 2, 4)

    assert pending.next_unsent() is first
    pending.on_accepted(first)
    assert pending.next_unsent() is second
    pending.on_accepted(second)
    assert pending.next_unsent() is None
    assert (pending.sent, pending.sent_bytes) == (2, 16)
    assert pending.unapplied == 2, "they are kept until they are applied"


@pytest.mark.parametrize(
    ("fate", "unapplied", "rework", "state"),
    [
        ("applied", 0, set(), None),
        ("pending", 1, set(), PushState.SENT),
        ("lost", 1, set(), PushState.UNSENT),
        ("rejected:checksum", 0, {SUBTASK}, None),
    ],
)
def test_the_fate_of_a_sent_update(
    fate: str, unapplied: int, rework: set[int], state: PushState | None
) -> None:
    pending = PendingUpdates()
    update = push(pending, 0, 2)

    report(pending, fate)

    assert pending.unapplied == unapplied
    assert pending.take_settled().rework == rework
    assert state is None or update.state is state


def test_settled_updates_are_in_the_version_or_never_will_be() -> None:
    pending = PendingUpdates()
    for start in (0, 2, 4, 6):
        push(pending, start, start + 2)
    pending.watch(SUBTASK + 1, EPOCH, SIZE)
    assert (pending.added, pending.settled) == (4, 0)

    # The replicas don't have the first one yet.
    report(pending, "applied", "rejected:checksum", "pending", "pending", "pending", safe=4)

    assert pending.unapplied == 3
    assert pending.settled == 2
    pending.forget(SUBTASK)
    assert pending.settled == 4


@pytest.mark.parametrize(
    ("fate", "watched", "rework"),
    [("applied", False, set()), ("pending", True, set()), ("lost", False, {SUBTASK})],
)
def test_the_fate_of_what_others_pushed(fate: str, watched: bool, rework: set[int]) -> None:
    pending = PendingUpdates()
    pending.watch(SUBTASK, EPOCH, SIZE)
    pending.watch(SUBTASK, EPOCH, SIZE)
    assert pending.unapplied == 0, "it takes no room"

    report(pending, fate)

    assert pending.take_settled().rework == rework
    assert (SUBTASK in pending.subtasks()) is watched


def test_settled_outcomes_are_returned_once() -> None:
    pending = PendingUpdates()
    push(pending, 0, 2)
    report(pending, "rejected:length")

    assert pending.subtasks() == {SUBTASK}, "its outcome isn't taken yet"
    assert pending.take_settled().rejected == ((SUBTASK, "length"),)
    assert pending.take_settled().rejected == ()
    assert pending.subtasks() == frozenset()


@pytest.mark.parametrize(
    ("versions", "unapplied"),
    [
        pytest.param([((5, 1), 4)], 1, id="the replicas lack its version"),
        pytest.param([((5, 1), 4), ((7, 1), 5)], 0, id="the replicas have its version"),
        pytest.param([((5, 1), 4), ((7, 2), 5)], 1, id="another writer"),
        pytest.param([((5, 1), 4), ((4, 1), 4)], 0, id="an older version that is safe"),
        pytest.param([((5, 1), 4), ((4, 1), 3)], 1, id="an older version that isn't safe"),
    ],
)
def test_an_update_is_kept_until_its_version_is_on_the_replicas(
    versions: list[tuple[tuple[int, int], int]], unapplied: int
) -> None:
    pending = PendingUpdates()
    push(pending, 0, 2)

    for version, safe in versions:
        report(pending, "applied", version=version, safe=safe)

    assert pending.unapplied == unapplied


def test_an_update_that_was_lost_starts_over() -> None:
    pending = PendingUpdates()
    update = push(pending, 0, 2)
    report(pending, "applied", version=(5, 1), safe=4)
    report(pending, "lost")
    pending.on_accepted(update)

    report(pending, "applied", version=(6, 1), safe=5)

    assert pending.unapplied == 1, "version 5 of the lost history doesn't count"


@pytest.mark.parametrize(
    ("position", "rework"),
    [
        pytest.param(4, set(), id="another worker did it"),
        pytest.param(7, set(), id="another worker did more"),
        pytest.param(3, {SUBTASK}, id="another worker did a part"),
        pytest.param(0, {SUBTASK}, id="a part before it is missing"),
    ],
)
def test_a_refused_update_is_dropped(position: int, rework: set[int]) -> None:
    pending = PendingUpdates()
    update = add(pending, 2, 4)

    pending.on_refused(update, position)

    assert pending.unapplied == 0
    assert pending.discarded == 1
    assert pending.take_settled().rework == rework


def test_an_update_of_an_applied_subtask_is_kept_until_that_is_safe() -> None:
    """The answer to its first push may have been lost."""
    pending = PendingUpdates()
    update = add(pending, 2, 4)

    pending.on_refused(update, -1)
    report(pending, "applied", version=(5, 1), safe=4)
    assert pending.unapplied == 1

    report(pending, "applied", version=(5, 1), safe=5)
    assert pending.unapplied == 0
    assert pending.take_settled().rework == set()


def test_a_refused_update_waits_for_the_ones_before_it() -> None:
    pending = PendingUpdates()
    first, second = push(pending, 0, 2), push(pending, 2, 4)
    third = add(pending, 4, 6)

    pending.on_refused(third, 0)

    assert [each.state for each in (first, second, third)] == [PushState.UNSENT] * 3
    assert pending.next_unsent() is first
    assert (pending.sent_again, pending.discarded) == (2, 0)


def test_a_forgotten_subtask_has_no_outcome() -> None:
    pending = PendingUpdates()
    push(pending, 0, 2)
    report(pending, "rejected:checksum")
    add(pending, 0, 2)

    pending.forget(SUBTASK)

    assert pending.subtasks() == frozenset()
    assert pending.next_unsent() is None
    assert pending.take_settled().rework == frozenset()


def test_reached_is_the_end_of_a_leases_updates() -> None:
    pending = PendingUpdates()
    push(pending, 0, 2)
    add(pending, 2, 4)
    pending.watch(SUBTASK + 1, EPOCH, SIZE)

    assert pending.reached(SUBTASK, token=1) == 4
    assert pending.reached(SUBTASK, token=2) == pending.reached(SUBTASK + 1, token=1) == 0


def test_delays_are_of_own_updates_and_bounded() -> None:
    pending = PendingUpdates()
    pending.watch(SUBTASK + 1, EPOCH, SIZE)
    for start in range(DELAYS_KEPT + 1):
        push(pending, start, start + 1)
    report(pending, *["applied"] * (DELAYS_KEPT + 2))

    assert len(pending.take_delays()) == DELAYS_KEPT
    assert pending.take_delays() == []
