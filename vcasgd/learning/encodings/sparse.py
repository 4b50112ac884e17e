"""Sparse codecs: some numbers of each block. The others decode to 0 and are sent later."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.learning.encodings.dense import BFloat16
from vcasgd.learning.encodings.payload import Codec


class TopK(Codec):
    """Top-k with error feedback (Aji 2017, arXiv 1704.05021; Lin 2017, arXiv 1712.01887).

    Each block of 65,536 numbers sends the 1024 of largest magnitude in 4096 bytes, 1/64 of
    float32: their indices, uint16, then their values, bfloat16. The last block is padded with
    zeros. Numbers are selected within each block, so the vector is never sorted. All others decode
    to 0 and are sent with later updates
    (:class:`~vcasgd.learning.encodings.blocks.ErrorFeedback`). Every 16-bit index is in the
    block, so a payload can't contain an invalid one.
    """

    name = "topk"
    block_floats, block_bytes = 1 << 16, 1 << 12
    kept = 1024

    def encode(self, vector: Tensor) -> memoryview:
        """Return a copy."""
        numbers = vector.detach().to("cpu", torch.float32).numpy()
        rows = np.zeros((-(-len(numbers) // self.block_floats), self.block_floats), np.float32)
        rows.reshape(-1)[: len(numbers)] = numbers
        # NaN counts as the largest, so it is sent and then detected
        indices = np.argpartition(np.abs(rows), -self.kept, axis=1)[:, -self.kept :]
        indices.sort(axis=1)
        values = torch.from_numpy(np.take_along_axis(rows, indices, 1)).to(torch.bfloat16)
        blocks = np.empty((len(rows), 2 * self.kept), "<u2")
        blocks[:, : self.kept] = indices
        blocks[:, self.kept :] = values.view(torch.int16).numpy().view(np.uint16)
        return blocks.reshape(-1).view(np.uint8).data.toreadonly()

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = self._target(payload, scratch)
        target = out.zero_().numpy().reshape(-1, self.block_floats)
        blocks = np.frombuffer(payload, "<u2").reshape(-1, 2 * self.kept)
        values = blocks[:, self.kept :].astype(np.uint32) << 16
        indices = blocks[:, : self.kept].astype(np.int64)
        np.put_along_axis(target, indices, values.view(np.float32), 1)
        return out

    def max_magnitude(self, payload: bytes | memoryview) -> float:
        blocks = np.frombuffer(payload, "<u2").reshape(-1, 2 * self.kept)
        return BFloat16().max_magnitude(blocks[:, self.kept :].tobytes())


class Partition(Codec):
    """Partial gradient exchange (Ako: Watcharapichat 2016, *Decentralised Deep Learning with
    Partial Gradient Exchange*).

    A block of 510·p numbers has p equal parts. Each update sends one part of each block in 1024
    bytes, 1/(2p) of float32: its number, uint32, then its values, bfloat16. The last block is
    padded with zeros; a model of fewer than 510 numbers is all in one part. Parts take turns, so a
    difference is held back for at most p − 1 updates
    (:class:`~vcasgd.learning.encodings.blocks.ErrorFeedback`).
    """

    name = "partition"
    kept = 510
    block_bytes = 1 << 10

    def __init__(self, parts: int = 4, number: int = 0) -> None:
        self._parts = parts
        self._part = number % parts
        self.block_floats = parts * self.kept

    def for_update(self, number: int) -> Self:
        return type(self)(self._parts, number)

    def encode(self, vector: Tensor) -> memoryview:
        """Return a copy."""
        numbers = vector.detach().to("cpu", torch.float32)
        numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % self.block_floats))
        parts = numbers.view(-1, self._parts, self.kept)[:, self._part].to(torch.bfloat16)
        blocks = np.empty((len(parts), self.block_bytes), np.uint8)
        blocks[:, :4].view("<u4")[:] = self._part
        blocks[:, 4:].view("<u2")[:] = parts.view(torch.int16).numpy().view(np.uint16)
        return blocks.reshape(-1).data.toreadonly()

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = self._target(payload, scratch)
        numbers, bits = self._split(payload)
        parts = out.zero_().numpy().reshape(-1, self._parts, self.kept)
        # max_magnitude() already rejected payloads with an invalid part number
        parts[np.arange(len(numbers)), numbers % self._parts] = bits.view(np.float32)
        return out

    def max_magnitude(self, payload: bytes | memoryview) -> float:
        """Return the largest magnitude; NaN also if a block has an invalid part number."""
        numbers, bits = self._split(payload)
        if len(numbers) and int(numbers.max()) >= self._parts:
            return math.nan
        return BFloat16().max_magnitude((bits >> 16).astype("<u2").tobytes())

    def _split(self, payload: bytes | memoryview) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return each block's part number ``[blocks]`` and its float32 bits ``[blocks, kept]``."""
        blocks = np.frombuffer(payload, np.uint8).reshape(-1, self.block_bytes)
        numbers = np.ascontiguousarray(blocks[:, :4]).view("<u4").reshape(-1)
        values = np.ascontiguousarray(blocks[:, 4:]).view("<u2")
        return numbers, np.left_shift(values, 16, dtype=np.uint32)
