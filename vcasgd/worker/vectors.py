"""Memory for vectors of a job's size, which a worker needs again and again.

An allocator would do worse: it returns large blocks to the system, whose pages then have to be
zeroed and mapped again, or can't reuse them because of the alignment that torch asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from vcasgd.learning.vector import Floats, MappedVector, new_vector

#: Vectors of a pool in one file, which takes memory only for those that exist.
MAX_MAPPED = 1 << 10


class Vector:
    """A vector, float32 [floats], which can be used again once all holders have released it.

    ``memory`` is mapped in parts if its pool says so.
    """

    def __init__(self, memory: Floats, pool: VectorPool) -> None:
        self.memory = memory
        self._pool = pool
        self._holders = 0

    @property
    def device(self) -> torch.device:
        """The device that its memory is on."""
        return self._pool.device

    @property
    def shared(self) -> bool:
        with self._pool.lock:
            return self._holders > 1

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
    """All vectors of a worker on one device. Thread-safe.

    If they are ``mapped``, this process has only those parts of them that it uses.
    """

    def __init__(
        self, floats: int, device: torch.device | str = "cpu", *, mapped: bool = False
    ) -> None:
        self._floats = floats
        self.device = torch.device(device)
        self._mapped = MappedVector(MAX_MAPPED * floats) if mapped else None
        self._made = 0
        self.lock = threading.Lock()
        #: Vectors without a holder, with any content.
        self.free: list[Vector] = []

    def take(self) -> Vector:
        """Return a vector with any content, which the caller holds."""
        with self.lock:
            vector = self.free.pop() if self.free else None
        return (vector or Vector(self._new(), self)).hold()

    def trim(self) -> None:
        """Give the memory of vectors without a holder back to the system."""
        with self.lock:
            unused, self.free = self.free, []
        for vector in unused:
            if isinstance(vector.memory, MappedVector):
                vector.memory.give_back()
                with self.lock:
                    # Its place in the file remains.
                    self.free.append(vector)

    def _new(self) -> Floats:
        if self._mapped is not None:
            with self.lock:
                start, self._made = self._made * self._floats, self._made + 1
            assert self._made <= MAX_MAPPED
            return self._mapped.between(start, start + self._floats)
        if self.device.type == "cpu":
            return new_vector(self._floats)
        return torch.empty(self._floats, device=self.device)


@contextmanager
def beside_training(device: torch.device) -> Iterator[None]:
    """Compute on a device without waiting for the training, and wait for the results at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def await_device(device: torch.device) -> None:
    """Wait until a device has computed what this thread has told it to."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def single_threaded(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread whose operations on vectors use one processor.

    With more, they would take processors from a training that waits for its slowest thread.
    """
    limited = threading.Event()

    def limit() -> None:
        torch.set_num_threads(1)
        limited.set()
        run()

    processors = torch.get_num_threads()
    thread = threading.Thread(target=limit, name=name, daemon=True)
    thread.start()
    limited.wait()
    # The limit of one thread is also that of threads that start later.
    torch.set_num_threads(processors)
    return thread
