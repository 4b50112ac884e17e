"""Some numbers of each block; the others are 0, and sent with later updates."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.learning.codecs.base import target_of
from vcasgd.learning.codecs.dense import BFloat16


class TopK:
    """Of each block of 65,536 numbers the 1024 of the largest magnitude, as their places, uint16,
    and then their values, bfloat16; 4096 bytes, a 64th of float32. (Top-k with error feedback:
    Aji 2017, arXiv 1704.05021; Lin 2017, arXiv 1712.01887.)

    They are found by selection in each block, not by sorting the vector. All others are 0 here, and
    are sent with later updates (:class:`~vcasgd.learning.encoding.Feedback`). Every place that 16
    bits can name is in the block, so no payload names one that is not. The last block is filled up
    with zeros.
    """

    name = "topk"
    block_floats, block_bytes = 1 << 16, 1 << 12
    kept = 1024
    for_statistics = False
    halves = False

    def at(self, turn: int) -> Self:  # noqa: ARG002 - all turns are alike
        return self

    def encode(self, vector: Tensor) -> memoryview:
        """Always a copy."""
        numbers = vector.detach().to("cpu", torch.float32).numpy()
        rows = np.zeros((-(-len(numbers) // self.block_floats), self.block_floats), np.float32)
        rows.reshape(-1)[: len(numbers)] = numbers
        # what is not a number counts as the largest, so it is sent, and found
        places = np.argpartition(np.abs(rows), -self.kept, axis=1)[:, -self.kept :]
        places.sort(axis=1)
        values = torch.from_numpy(np.take_along_axis(rows, places, 1)).to(torch.bfloat16)
        blocks = np.empty((len(rows), 2 * self.kept), "<u2")
        blocks[:, : self.kept] = places
        blocks[:, self.kept :] = values.view(torch.int16).numpy().view(np.uint16)
        return blocks.reshape(-1).view(np.uint8).data.toreadonly()

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        target = target_of(self, payload, out, offset).reshape(-1, self.block_floats)
        blocks = np.frombuffer(payload, "<u2").reshape(-1, 2 * self.kept)
        values = blocks[:, self.kept :].astype(np.uint32) << 16
        target[:] = 0
        np.put_along_axis(
            target, blocks[:, : self.kept].astype(np.int64), values.view(np.float32), 1
        )

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = scratch[: payload.nbytes // self.block_bytes * self.block_floats]
        self.decode(payload, out)
        return out

    def largest(self, payload: bytes | memoryview) -> float:
        blocks = np.frombuffer(payload, "<u2").reshape(-1, 2 * self.kept)
        return BFloat16().largest(blocks[:, self.kept :].tobytes())

    def encoded_size(self, elements: int) -> int:
        return -(-elements // self.block_floats) * self.block_bytes


class Partition:
    """Of each block of 510·p numbers the one of p equal parts whose turn it is, as its place,
    uint32, and then its values, bfloat16; 1024 bytes, a 2p-th of float32. (Ako: Watcharapichat
    2016, *Decentralised Deep Learning with Partial Gradient Exchange*.)

    The turn goes round with a worker's updates, so what it has learned is kept back for p − 1 of
    them at most (:class:`~vcasgd.learning.encoding.Feedback`). The last block is filled up with
    zeros; a model of fewer than 510 numbers has all of them in one part.
    """

    name = "partition"
    kept = 510
    block_bytes = 1 << 10
    for_statistics = False
    halves = False

    def __init__(self, parts: int = 4, turn: int = 0) -> None:
        self._parts = parts
        self._turn = turn % parts
        self.block_floats = parts * self.kept

    def at(self, turn: int) -> Self:
        return type(self)(self._parts, turn)

    def encode(self, vector: Tensor) -> memoryview:
        """Always a copy."""
        numbers = vector.detach().to("cpu", torch.float32)
        numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % self.block_floats))
        parts = numbers.view(-1, self._parts, self.kept)[:, self._turn].to(torch.bfloat16)
        blocks = np.empty((len(parts), self.block_bytes), np.uint8)
        blocks[:, :4].view("<u4")[:] = self._turn
        blocks[:, 4:].view("<u2")[:] = parts.view(torch.int16).numpy().view(np.uint16)
        return blocks.reshape(-1).data.toreadonly()

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        target = target_of(self, payload, out, offset)
        places, bits = self._split(payload)
        target[:] = 0
        parts = target.reshape(-1, self._parts, self.kept)
        # what has no place here was refused by its largest() already
        parts[np.arange(len(places)), places % self._parts] = bits.view(np.float32)

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = scratch[: payload.nbytes // self.block_bytes * self.block_floats]
        self.decode(payload, out)
        return out

    def largest(self, payload: bytes | memoryview) -> float:
        """As of any codec; NaN also where a block names a part that there is none of."""
        places, bits = self._split(payload)
        if len(places) and int(places.max()) >= self._parts:
            return math.nan
        return BFloat16().largest((bits >> 16).astype("<u2").tobytes())

    def encoded_size(self, elements: int) -> int:
        return -(-elements // self.block_floats) * self.block_bytes

    def _split(self, payload: bytes | memoryview) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Of each block its place ``[blocks]``, and the bits of its float32 ``[blocks, kept]``."""
        blocks = np.frombuffer(payload, np.uint8).reshape(-1, self.block_bytes)
        places = np.ascontiguousarray(blocks[:, :4]).view("<u4").reshape(-1)
        halves = np.ascontiguousarray(blocks[:, 4:]).view("<u2")
        return places, np.left_shift(halves, 16, dtype=np.uint32)
