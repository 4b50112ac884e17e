"""The queue of a worker's unapplied updates, without servers."""

from __future__ import annotations

import pytest
from support.updates import header_of

from vcasgd.store.tensors.updates import UpdateStatus
from vcasgd.worker.update_queue import DELAYS_KEPT, QueuedUpdate, UpdateQueue, UpdateState

SUBTASK, EPOCH, SIZE = 3, 0, 10
PAYLOAD = memoryview(b"12345678")


def add(queue: UpdateQueue, start: int, stop: int, token: int = 1) -> QueuedUpdate:
    """Add an update and return it."""
    fields = {"subtask": SUBTASK, "start": start, "stop": stop, "token": token}
    header = header_of(size=len(PAYLOAD), **fields)
    return queue.add(header, EPOCH, PAYLOAD)


def push(queue: UpdateQueue, start: int, stop: int) -> QueuedUpdate:
    """Add an update that the server accepts."""
    update = add(queue, start, stop)
    queue.on_accepted(update)
    return update


def report(
    queue: UpdateQueue, *fates: str, version: tuple[int, int] = (5, 1), safe: int = 99
) -> None:
    """Record the server's answer about all sent updates."""
    queue.on_status(queue.pushed(), UpdateStatus(version, safe, list(fates)))


def test_settled_updates_are_in_the_version_or_never_will_be() -> None:
    queue = UpdateQueue()
    for start in (0, 2, 4, 6):
        push(queue, start, start + 2)
    queue.watch(SUBTASK + 1, EPOCH, SIZE)
    assert (queue.added, queue.settled) == (4, 0)

    # The replicas don't have the first one yet.
    report(queue, "applied", "rejected:checksum", "pending", "pending", "pending", safe=4)

    assert queue.unapplied == 3
    assert queue.settled == 2
    queue.forget(SUBTASK)
    assert queue.settled == 4


@pytest.mark.parametrize(
    ("fate", "watched", "rework"),
    [("applied", False, set()), ("pending", True, set()), ("lost", False, {SUBTASK})],
)
def test_the_fate_of_what_others_pushed(fate: str, watched: bool, rework: set[int]) -> None:
    queue = UpdateQueue()
    queue.watch(SUBTASK, EPOCH, SIZE)
    queue.watch(SUBTASK, EPOCH, SIZE)
    assert queue.unapplied == 0, "it takes no room"

    report(queue, fate)

    assert queue.take_settled().rework == rework
    assert (SUBTASK in queue.subtasks()) is watched


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
    queue = UpdateQueue()
    push(queue, 0, 2)

    for version, safe in versions:
        report(queue, "applied", version=version, safe=safe)

    assert queue.unapplied == unapplied


def test_an_update_that_was_lost_starts_over() -> None:
    queue = UpdateQueue()
    update = push(queue, 0, 2)
    report(queue, "applied", version=(5, 1), safe=4)
    report(queue, "lost")
    queue.on_accepted(update)

    report(queue, "applied", version=(6, 1), safe=5)

    assert queue.unapplied == 1, "version 5 of the lost history doesn't count"


def test_a_snapshot_can_have_an_update_before_its_push_is_acknowledged() -> None:
    queue = UpdateQueue()
    update = add(queue, 0, 2)

    report(queue, "applied")

    assert (queue.added, queue.settled, queue.unapplied) == (1, 1, 0)
    queue.on_accepted(update)
    queue.on_refused(update, 2)
    assert (queue.settled, queue.discarded) == (1, 0)


def test_an_update_without_bytes_is_asked_for() -> None:
    queue = UpdateQueue()
    header = header_of(size=0, subtask=SUBTASK, start=0, stop=2, token=1)

    update = queue.add(header, EPOCH, memoryview(b""))

    assert queue.pushed() == [update]


def test_an_update_that_came_after_the_question_is_not_lost() -> None:
    queue = UpdateQueue()
    update = add(queue, 0, 2)
    asked = queue.pushed()
    queue.on_accepted(update)

    queue.on_status(asked, UpdateStatus((5, 1), 99, ["lost"]))

    assert (queue.sent_again, queue.unapplied) == (0, 1)
    report(queue, "lost")
    assert queue.sent_again == 1


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
    queue = UpdateQueue()
    update = add(queue, 2, 4)

    queue.on_refused(update, position)

    assert queue.unapplied == 0
    assert queue.discarded == 1
    assert queue.take_settled().rework == rework


def test_an_update_of_an_applied_subtask_is_kept_until_that_is_safe() -> None:
    """The answer to its first push may have been lost."""
    queue = UpdateQueue()
    update = add(queue, 2, 4)

    queue.on_refused(update, -1)
    report(queue, "applied", version=(5, 1), safe=4)
    assert queue.unapplied == 1

    report(queue, "applied", version=(5, 1), safe=5)
    assert queue.unapplied == 0
    assert queue.take_settled().rework == set()


def test_a_refused_update_waits_for_the_ones_before_it() -> None:
    queue = UpdateQueue()
    first, second = push(queue, 0, 2), push(queue, 2, 4)
    third = add(queue, 4, 6)

    queue.on_refused(third, 0)

    assert [each.state for each in (first, second, third)] == [UpdateState.UNSENT] * 3
    assert queue.take_unsent() is first
    assert (queue.sent_again, queue.discarded) == (2, 0)


def test_a_forgotten_subtask_has_no_outcome() -> None:
    queue = UpdateQueue()
    push(queue, 0, 2)
    report(queue, "rejected:checksum")
    add(queue, 0, 2)

    queue.forget(SUBTASK)

    assert queue.subtasks() == frozenset()
    assert queue.await_accepted(0)
    assert queue.take_settled().rework == frozenset()


def test_reached_is_the_end_of_a_leases_updates() -> None:
    queue = UpdateQueue()
    push(queue, 0, 2)
    add(queue, 2, 4)
    queue.watch(SUBTASK + 1, EPOCH, SIZE)

    assert queue.reached(SUBTASK, token=1) == 4
    assert queue.reached(SUBTASK, token=2) == queue.reached(SUBTASK + 1, token=1) == 0


def test_delays_are_of_own_updates_and_bounded() -> None:
    queue = UpdateQueue()
    queue.watch(SUBTASK + 1, EPOCH, SIZE)
    for start in range(DELAYS_KEPT + 1):
        push(queue, start, start + 1)
    report(queue, *["applied"] * (DELAYS_KEPT + 2))

    assert len(queue.delays) == DELAYS_KEPT
