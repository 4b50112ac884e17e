"""Memory for vectors of a job's size, which a worker needs again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import new_vector


class VectorPool:
    """Float32 vectors of a job that is cut into ``parts``, with any content.

    Memory comes back part by part, when nothing refers to it: a store node may have applied its
    part of an update long before the others, and the next base of that node has room there.

    An allocator would do worse: it returns large blocks to the system, whose pages then have to be
    zeroed and mapped again, or can't reuse them because of the alignment that torch asks for.
    Thread-safe.
    """

    def __init__(self, parts: Sequence[ShardRange], usual: int) -> None:
        """``usual`` is the number of vectors that are always worth their memory."""
        self._parts = parts
        self.usual = usual
        self._blocks: list[_Block] = []
        self._lock = threading.RLock()

    def take(self) -> Tensor:
        """Return a vector, float32 [floats]."""
        with self._lock:
            free = self.find()
            return self._add_block().lend(self._parts) if free is None else free

    def find(self) -> Tensor | None:
        """Return a vector in memory that is here already; None if there is none."""
        with self._lock:
            whole = (block for block in self._blocks if block.count_free() == len(self._parts))
            block = next(whole, None)
            return block.lend(self._parts) if block else None

    def take_part(self, part: ShardRange, beside: Iterable[Tensor], *, grow: bool) -> Tensor | None:
        """Return a part of a vector, float32 [part.floats].

        It is in the memory of one ``beside`` it if possible, so that they can be joined. Unless the
        pool may ``grow`` beyond its usual number of vectors, None if there is no memory.
        """
        with self._lock:
            near = {self._block_of(other) for other in beside}
            free = [block for block in self._blocks if block.is_free(part.shard)]
            # A vector that is free as a whole may be needed as one.
            free.sort(key=lambda block: (block not in near, block.count_free()))
            if not free and (grow or len(self._blocks) < self.usual):
                free = [self._add_block()]
            return part.of(free[0].lend([part])) if free else None

    def keep_part(self, vector: Tensor, part: ShardRange) -> Tensor:
        """Return the same vector, which keeps nothing but a part from being used again.

        A vector of another origin is returned itself.
        """
        with self._lock:
            block = self._block_of(vector)
            return block.lend([part]) if block else vector

    def join(self, parts: Mapping[ShardRange, Tensor]) -> Tensor | None:
        """Return a vector that consists of all ``parts``, in the memory of one of them.

        Those that are elsewhere are copied; None if there is no room for them.
        """
        with self._lock:
            homes = {part: self._block_of(taken) for part, taken in parts.items()}
            for block in set(homes.values()):
                away = [part for part, home in homes.items() if home is not block]
                if block and all(block.is_free(part.shard) for part in away):
                    vector = block.lend(self._parts)
                    for part in away:
                        part.of(vector).copy_(parts[part])
                    return vector
        return None

    def _add_block(self) -> _Block:
        block = _Block(new_vector(self._parts[-1].stop).numpy(), len(self._parts))
        self._blocks.append(block)
        return block

    def _block_of(self, tensor: Tensor) -> _Block | None:
        return next((block for block in self._blocks if block.contains(tensor)), None)


class _Block:
    """Memory of one vector, and what refers to each of its parts."""

    def __init__(self, memory: NDArray[np.float32], parts: int) -> None:
        self._memory = memory
        self._users: list[list[ref[NDArray[np.float32]]]] = [[] for _ in range(parts)]

    def contains(self, tensor: Tensor) -> bool:
        offset = tensor.data_ptr() - self._memory.ctypes.data
        return 0 <= offset < self._memory.nbytes

    def is_free(self, shard: int) -> bool:
        users = self._users[shard]
        users[:] = [user for user in users if user() is not None]
        return not users

    def count_free(self) -> int:
        return sum(map(self.is_free, range(len(self._users))))

    def lend(self, parts: Iterable[ShardRange]) -> Tensor:
        """Return the whole vector, of which ``parts`` are used while it, or any view, exists."""
        view = self._memory.view()
        for part in parts:
            self._users[part.shard].append(ref(view))
        # Everything that shares the tensor's memory keeps the array alive.
        return torch.from_numpy(view)
