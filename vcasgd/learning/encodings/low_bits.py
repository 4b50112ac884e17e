"""The codec of a few levels per number: ``int2``, 2.71 bits a number, packed about 2.

Several numbers share a byte, whose value is a number in base L with a digit for each of them. A
block has 128 bytes: its scale s, bfloat16, and 126 such bytes. A digit c stands for
``(c − h)·s`` with ``h = (L − 1)/2``. That product has at most 11 significant bits, so it is exact.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.learning.encodings.payload import Codec

_SCALE_BYTES = 2
#: Steps towards the best scale; more than two gain less than 1 % of the error.
_REFINEMENTS = 2
#: Numbers encoded at a time. With fewer, torch spends more time on starting operations; with more,
#: they leave the processor's cache.
_PIECE_FLOATS = 1 << 18


class Int2(Codec):
    """Uniform quantization with few levels and a scale for each block.

    Numbers beyond the outermost level are cut off. The scale is fitted to the codes, and the codes
    to the scale (Lloyd 1982). It starts larger than the best one for normally distributed numbers,
    because the payload is packed (:class:`~vcasgd.learning.encodings.packed.PackedFormat`), and a
    larger scale with nearly the same squared error has more codes that are 0. The rest is added to
    the next update (:class:`~vcasgd.learning.encodings.blocks.ErrorFeedback`). Bytes that no
    encoder writes decode to levels, too. The scale of a block is not finite if any of its numbers
    is not.
    """

    name = "int2"
    #: L, odd, so that one level is 0.
    levels = 5
    #: Numbers in a byte.
    digits = 3
    #: The scale to start from, for numbers of variance 1: 1.5 times the best one for normally
    #: distributed numbers.
    start = 1.26

    block_bytes = 128
    block_floats = (block_bytes - _SCALE_BYTES) * digits

    @property
    def _outermost(self) -> int:
        return self.levels // 2

    def encode(self, vector: Tensor) -> memoryview:
        """Return a copy."""
        numbers = vector.detach().to("cpu", torch.float32)
        padding = -len(numbers) % self.block_floats
        rows = torch.nn.functional.pad(numbers, (0, padding)).view(-1, self.block_floats)
        blocks = torch.empty(len(rows), self.block_bytes, dtype=torch.uint8)
        step = max(_PIECE_FLOATS // self.block_floats, 1)
        for start in range(0, len(rows), step):
            self._encode_rows(rows[start : start + step], blocks[start : start + step])
        return blocks.numpy().reshape(-1).data.toreadonly()

    def _encode_rows(self, rows: Tensor, blocks: Tensor) -> None:
        """Encode float32 ``[n, block_floats]`` into uint8 ``[n, block_bytes]``."""
        scales = self._scales(rows)
        usable = (scales >= torch.finfo(torch.float32).tiny) & scales.isfinite()
        quotients = rows * torch.where(usable, 1 / scales, 0)
        quotients.round_().clamp_(-self._outermost, self._outermost).nan_to_num_(0)
        codes = quotients.add_(self._outermost).to(torch.uint8).view(len(rows), -1, self.digits)
        blocks[:, :_SCALE_BYTES] = scales.bfloat16().view(torch.uint8)
        packed = codes[..., 0].contiguous()
        for digit in range(1, self.digits):
            packed.mul_(self.levels).add_(codes[..., digit])
        blocks[:, _SCALE_BYTES:] = packed

    def _scales(self, rows: Tensor) -> Tensor:
        """Return the scales, float32 ``[n, 1]`` in the precision of bfloat16."""
        sizes = rows.abs()
        largest = sizes.amax(1, keepdim=True)
        empty = largest < torch.finfo(torch.float32).tiny
        # Relative to the largest number, no square underflows.
        sizes.mul_(torch.where(empty, 0, 1 / largest))
        scales = self.start * self.block_floats**-0.5 * sizes.norm(dim=1, keepdim=True)
        for _ in range(_REFINEMENTS):
            codes = (sizes / scales).round_().clamp_(max=self._outermost)
            products = torch.linalg.vecdot(codes, sizes), torch.linalg.vecdot(codes, codes)
            scales = (products[0] / products[1]).unsqueeze(1)
        return torch.where(empty, 0, scales * largest).bfloat16().float()

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = self._target(payload, scratch)
        target = out.numpy().reshape(-1, self.block_floats)
        blocks = np.frombuffer(payload, np.uint8).reshape(-1, self.block_bytes)
        codes = np.take(self._table(), blocks[:, _SCALE_BYTES:], axis=0)
        # Garbage gets here only if its magnitude was not checked before.
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(codes.reshape(target.shape), _scales_of(blocks), out=target)
        return out

    def max_magnitude(self, payload: bytes | memoryview) -> float:
        scales = _scales_of(np.frombuffer(payload, np.uint8).reshape(-1, self.block_bytes))
        return self._outermost * float(np.max(np.abs(scales))) if len(scales) else 0.0

    def _table(self) -> NDArray[np.float32]:
        """Return the levels that each byte stands for, float32 ``[256, digits]``."""
        powers = self.levels ** np.arange(self.digits)[::-1]
        digits = np.arange(256)[:, None] // powers % self.levels
        return (digits - self._outermost).astype(np.float32)


def _scales_of(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the scales, float32 ``[blocks, 1]``, of uint8 ``[blocks, block_bytes]``."""
    bits = np.ascontiguousarray(blocks[:, :_SCALE_BYTES]).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32)
