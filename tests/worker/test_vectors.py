"""Memory of a worker's vectors, and the updates that hold it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from support.updates import header_of

from vcasgd.learning.encodings import Float32
from vcasgd.learning.encodings.blocks import BlockFormat
from vcasgd.learning.encodings.payload import EncodedVector
from vcasgd.learning.vector import MappedVector
from vcasgd.worker.update_queue import QueuedUpdate, UpdateQueue
from vcasgd.worker.vectors import Vector, VectorPool


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


Encode = Callable[[], EncodedVector]


def add(queue: UpdateQueue, payload: memoryview | Encode, *vectors: Vector) -> None:
    queue.add(header_of(), 0, payload, *vectors)
    release(vectors)


def release(vectors: Iterable[Vector]) -> None:
    for vector in vectors:
        vector.release()


def encoded(vector: Vector) -> memoryview:
    return Float32().encode(vector.memory[:])


def unsent(queue: UpdateQueue) -> QueuedUpdate:
    update = queue.take_unsent()
    assert update is not None
    return update


def test_an_update_that_is_dropped_while_it_is_sent_keeps_its_vector_until_then() -> None:
    pool, queue = VectorPool(3), UpdateQueue()
    vector = pool.take()
    add(queue, encoded(vector), vector)
    update = unsent(queue)

    queue.forget(0)
    queue.discard(update, rework=False)
    assert not pool.free, "the push thread still reads it"

    release(update.vectors)
    assert len(pool.free) == 1


def test_what_an_update_is_made_of_is_free_once_it_is_encoded() -> None:
    pool, queue = VectorPool(3), UpdateQueue()
    add(queue, encode, pool.take(), pool.take())
    update = unsent(queue)
    held = update.vectors
    assert not queue.encoded

    assert queue.encode(update)

    release(held)
    assert len(pool.free) == 1
    assert queue.encoded
    assert update.header is not None
    assert (update.header.codec, update.header.size) == ("float32", 12)


def test_an_update_that_is_dropped_while_it_is_encoded_frees_all() -> None:
    pool, queue = VectorPool(3), UpdateQueue()

    def drop() -> EncodedVector:
        queue.forget(0)
        return encode()

    add(queue, drop, pool.take(), pool.take())
    update = unsent(queue)
    held = update.vectors

    assert queue.encode(update)
    assert not pool.free, "the push thread still reads it"

    release(held)
    assert len(pool.free) == 2


def encode() -> EncodedVector:
    return BlockFormat(Float32(), 3, 3).encode(torch.ones(3))
