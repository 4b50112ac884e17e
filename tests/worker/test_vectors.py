"""Memory of a worker's vectors, and the updates that hold it."""

from __future__ import annotations

import os

from vcasgd.learning.encodings import Float32
from vcasgd.learning.vector import MappedVector
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.updates import UpdateStatus
from vcasgd.worker.update_queue import UpdateQueue
from vcasgd.worker.vectors import Vector, VectorPool


def test_a_vector_is_used_again_once_all_holders_have_released_it() -> None:
    pool = VectorPool(3)
    vector = pool.take().hold()
    assert pool.take() is not vector

    vector.release()
    assert pool.take() is not vector

    vector.release()
    assert pool.take() is vector


def test_vectors_without_a_holder_give_their_memory_back() -> None:
    floats = 3 << 20
    pool = VectorPool(floats, mapped=True)
    kept, unused = pool.take(), pool.take()
    for vector in (kept, unused):
        vector.memory[:].fill_(1.0)
    unused.release()
    assert bytes_of(kept) >= 8 * floats

    pool.trim()

    assert bytes_of(kept) < 5 * floats
    assert kept.memory[:].eq(1.0).all()
    again = pool.take()
    assert again is unused
    again.memory[:].fill_(2.0)
    assert kept.memory[:].eq(1.0).all()


def bytes_of(vector: Vector) -> int:
    """Return the memory of a mapped pool by one of its vectors."""
    assert isinstance(vector.memory, MappedVector)
    return 512 * os.fstat(vector.memory.place[0]).st_blocks


def test_vectors_that_are_not_mapped_are_freed() -> None:
    pool = VectorPool(3)
    pool.take().release()

    pool.trim()

    assert not pool.free


def add(queue: UpdateQueue, vector: Vector) -> None:
    payload = Float32().encode(vector.memory[:])
    header = Header(update="w.1.1", worker="w", subtask=0, start=0, stop=2, base=0, token=1,
                    codec="float32", size=len(payload), layout="l")  # fmt: skip
    queue.add(header, 0, payload, vector)
    vector.release()


def test_an_update_holds_its_vector_until_it_is_applied() -> None:
    pool, queue = VectorPool(3), UpdateQueue()
    add(queue, pool.take())

    for outcome, free in (("pending", 0), ("lost", 0), ("applied", 1)):
        update = queue.take_unsent() if queue.subtasks() and not queue.pushed() else None
        if update is not None:
            queue.on_accepted(update)
            for vector in update.vectors:
                vector.release()
        queue.on_status(queue.pushed(), UpdateStatus((1, 1), 1, [outcome]))
        assert len(pool.free) == free


def test_an_update_that_is_dropped_while_it_is_sent_keeps_its_vector_until_then() -> None:
    pool, queue = VectorPool(3), UpdateQueue()
    add(queue, pool.take())
    update = queue.take_unsent()
    assert update is not None

    queue.forget(0)
    queue.discard(update, rework=False)
    assert not pool.free, "the push thread still reads it"

    for vector in update.vectors:
        vector.release()
    assert len(pool.free) == 1
