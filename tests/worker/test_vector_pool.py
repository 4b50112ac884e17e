"""Memory of a worker's vectors."""

from __future__ import annotations

import gc

from vcasgd.learning.encodings import Float32
from vcasgd.worker.vector_pool import VectorPool


def test_memory_comes_back_when_nothing_refers_to_it() -> None:
    pool = VectorPool(5)
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
