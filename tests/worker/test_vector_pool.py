"""Memory of a worker's vectors."""

from __future__ import annotations

import gc

import pytest
import torch

from vcasgd.learning.encodings import Float32
from vcasgd.learning.shards import Cut
from vcasgd.worker.vector_pool import VectorPool

FIRST, SECOND = PARTS = Cut(5, 5, 2).parts


@pytest.fixture
def pool() -> VectorPool:
    return VectorPool(PARTS, usual=1)


def test_memory_comes_back_when_nothing_refers_to_it(pool: VectorPool) -> None:
    vector = pool.take().fill_(3.0)
    address, payload = vector.data_ptr(), Float32().encode(vector[1:])

    del vector
    gc.collect()
    other = pool.take()
    assert other.data_ptr() != address, "the payload still needs it"
    assert payload.tobytes() == Float32().encode(other.fill_(3.0)[1:]).tobytes()

    del payload
    gc.collect()
    assert pool.take().data_ptr() == address


def test_each_part_comes_back_by_itself(pool: VectorPool) -> None:
    vector = pool.take().fill_(3.0)
    payloads = [Float32().encode(part.of(pool.keep_part(vector, part))) for part in PARTS]
    address = vector.data_ptr()
    del vector
    assert pool.take_part(FIRST, [], grow=False) is None

    del payloads[0]
    first = pool.take_part(FIRST, [], grow=False)
    assert first is not None
    assert first.fill_(7.0).data_ptr() == address
    assert pool.find() is None
    assert payloads[0].tobytes() == bytes(memoryview(torch.full((3,), 3.0).numpy()))


def test_parts_are_taken_beside_each_other_and_joined(pool: VectorPool) -> None:
    vectors = [pool.take() for _ in range(2)]
    addresses = [vector.data_ptr() for vector in vectors]
    del vectors
    first = pool.take_part(FIRST, [], grow=False)
    assert first is not None
    second = pool.take_part(SECOND, [first], grow=False)
    assert second is not None

    joined = pool.join({FIRST: first.fill_(1.0), SECOND: second.fill_(2.0)})

    assert joined is not None
    assert joined.data_ptr() == first.data_ptr() in addresses
    assert joined.tolist() == [1.0] * 2 + [2.0] * 3


def test_a_part_that_lies_apart_is_copied_if_there_is_room(pool: VectorPool) -> None:
    vectors = [pool.take().fill_(number) for number in range(2)]
    parts = {
        part: part.of(pool.keep_part(vector, part))
        for part, vector in zip(PARTS, vectors, strict=True)
    }
    assert pool.join(parts) is None, "both vectors are in use"

    del vectors[0]
    joined = pool.join(parts)

    assert joined is not None
    assert joined.data_ptr() == parts[FIRST].data_ptr()
    assert joined.tolist() == [0.0] * 2 + [1.0] * 3
