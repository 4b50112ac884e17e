"""Memory for vectors of a job's size, which a worker needs again and again."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.learning.vector import new_vector


class VectorPool:
    """Float32 vectors of ``floats`` numbers. Memory comes back when nothing refers to a vector.

    An allocator would do worse: it returns large blocks to the system, whose pages then have to be
    zeroed and mapped again, or can't reuse them because of the alignment that torch asks for.
    Thread-safe.
    """

    def __init__(self, floats: int) -> None:
        self._floats = floats
        self._free: list[NDArray[np.float32]] = []

    def take(self) -> Tensor:
        """Return a vector, float32 [floats], with any content."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = new_vector(self._floats).numpy()
        # The tensor and everything that shares its memory keep the view alive.
        view = memory.view()
        weakref.finalize(view, self._free.append, memory).atexit = False
        return torch.from_numpy(view)
