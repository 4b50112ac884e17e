"""Memory for vectors of a job's size, which a worker needs again and again.

An allocator would do worse: it returns large blocks to the system, whose pages then have to be
zeroed and mapped again, or can't reuse them because of the alignment that torch asks for.
"""

from __future__ import annotations

import threading

from torch import Tensor

from vcasgd.learning.vector import new_vector


class Vector:
    """A vector, float32 [floats], which can be used again once all holders have released it."""

    def __init__(self, tensor: Tensor, pool: VectorPool) -> None:
        self.tensor = tensor
        self._pool = pool
        self._holders = 0

    def hold(self) -> Vector:
        """Add a holder; return the vector."""
        with self._pool.lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder, which must not use the vector any more."""
        with self._pool.lock:
            assert self._holders > 0, "released more often than held"
            self._holders -= 1
            if not self._holders:
                self._pool.free.append(self)


class VectorPool:
    """All vectors of a worker. Thread-safe."""

    def __init__(self, floats: int) -> None:
        self._floats = floats
        self.lock = threading.Lock()
        #: Vectors without a holder, with any content.
        self.free: list[Vector] = []

    def take(self) -> Vector:
        """Return a vector with any content, which the caller holds."""
        with self.lock:
            vector = self.free.pop() if self.free else None
        return (vector or Vector(new_vector(self._floats), self)).hold()
