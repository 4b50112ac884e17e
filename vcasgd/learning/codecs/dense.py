"""Every number of a vector, in the same number of bytes."""

from __future__ import annotations

import sys
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.learning.codecs.base import target_of


class Float32:
    """As it is: four bytes an element, no loss, no copy on little-endian machines."""

    name = "float32"
    block_floats, block_bytes = 1, 4
    for_statistics = True
    halves = False

    def at(self, turn: int) -> Self:  # noqa: ARG002 - all turns are alike
        return self

    def encode(self, vector: Tensor) -> memoryview:
        """Shares the memory of a contiguous float32 vector on the CPU."""
        return _bytes_of(vector.detach().to("cpu", torch.float32).numpy(), "<f4")

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        target = target_of(self, payload, out, offset)
        target[:] = np.frombuffer(payload, "<f4")

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        if sys.byteorder == "little":
            return torch.frombuffer(payload, dtype=torch.float32)
        self.decode(payload, scratch)
        return scratch[: payload.nbytes // self.block_bytes]

    def largest(self, payload: bytes | memoryview) -> float:
        numbers = np.frombuffer(payload, "<f4")
        # both let NaN through
        return float(max(np.max(numbers), -np.min(numbers))) if len(numbers) else 0.0

    def encoded_size(self, elements: int) -> int:
        return elements * self.block_bytes


class BFloat16:
    """The upper half of a float32, rounded to the nearest, ties to even: two bytes an element.

    The relative error is at most 2⁻⁸ for normal numbers; the range is that of float32.
    """

    name = "bfloat16"
    block_floats, block_bytes = 1, 2
    for_statistics = True
    halves = True

    def at(self, turn: int) -> Self:  # noqa: ARG002 - all turns are alike
        return self

    def encode(self, vector: Tensor) -> memoryview:
        """Always a copy."""
        # NumPy has no bfloat16, so its bits travel as int16
        bits = vector.detach().to("cpu", torch.bfloat16).view(torch.int16)
        return _bytes_of(bits.numpy(), "<i2")

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        target = target_of(self, payload, out, offset).view(np.uint32)
        np.left_shift(np.frombuffer(payload, "<u2"), 16, out=target, dtype=np.uint32)

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = scratch[: payload.nbytes // self.block_bytes]
        if sys.byteorder == "little":
            # torch converts with vector instructions, NumPy's shift has to widen first
            return out.copy_(torch.frombuffer(payload, dtype=torch.bfloat16))
        self.decode(payload, out)
        return out

    def largest(self, payload: bytes | memoryview) -> float:
        bits = np.frombuffer(payload, "<u2")
        # among numbers of one sign a larger magnitude has larger bits, and NaN the largest;
        # as unsigned numbers the negative ones come last, as signed ones the positive
        negative = int(np.max(bits, initial=0x8000)) & 0x7FFF
        positive = int(np.max(bits.view("<i2"), initial=0))
        return float(np.uint32(max(negative, positive) << 16).view(np.float32))

    def encoded_size(self, elements: int) -> int:
        return elements * self.block_bytes


class Int8:
    """Blocks of 252 numbers: their scale as a float32, ``s = max|x|/127``, then ``round(x/s)``,
    each as a byte; 256 bytes. (Blockwise quantization: Dettmers 2021, arXiv 2110.02861.)

    The error of a number is at most s/2, 1/254 of the largest in its block: small numbers beside
    large ones become 0. So it is for differences, where what was lost is sent with the next update
    (:class:`~vcasgd.learning.encoding.Feedback`), and not for running statistics. A block with a
    number that is not finite has a scale that is not, and one with none above 1.5e-36 is all zeros.
    The last block is filled up with zeros.
    """

    name = "int8"
    block_floats, block_bytes = 252, 256
    for_statistics = False
    halves = False

    def at(self, turn: int) -> Self:  # noqa: ARG002 - all turns are alike
        return self

    def encode(self, vector: Tensor) -> memoryview:
        """Always a copy."""
        numbers = vector.detach().to("cpu", torch.float32)
        spare = -len(numbers) % self.block_floats
        blocks_needed = (len(numbers) + spare) // self.block_floats
        rows = torch.nn.functional.pad(numbers, (0, spare)).view(blocks_needed, self.block_floats)
        least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        # all three let NaN through
        scales = torch.maximum(most, -least) / 127
        # nothing is left of a block whose scale underflows or is not finite
        usable = (scales >= torch.finfo(torch.float32).tiny) & scales.isfinite()
        quotients = rows * torch.where(usable, 1 / scales, 0)
        quotients.round_().clamp_(-127, 127).nan_to_num_(0)
        blocks = np.empty((len(rows), self.block_bytes), np.uint8)
        blocks[:, :4] = scales.numpy().astype("<f4").view(np.uint8)
        blocks[:, 4:] = quotients.to(torch.int8).numpy().view(np.uint8)
        return blocks.reshape(-1).data.toreadonly()

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        target = target_of(self, payload, out, offset).reshape(-1, self.block_floats)
        blocks = np.frombuffer(payload, np.uint8).reshape(-1, self.block_bytes)
        # garbage has been decoded here only where nobody looked at it before
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(blocks[:, 4:].view(np.int8), _scales(blocks), out=target)

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = scratch[: payload.nbytes // self.block_bytes * self.block_floats]
        self.decode(payload, out)
        return out

    def largest(self, payload: bytes | memoryview) -> float:
        scales = _scales(np.frombuffer(payload, np.uint8).reshape(-1, self.block_bytes))
        # a byte goes down to -128, whatever an honest worker sends
        return 128 * float(np.max(np.abs(scales))) if len(scales) else 0.0

    def encoded_size(self, elements: int) -> int:
        return -(-elements // self.block_floats) * self.block_bytes


def _bytes_of(array: NDArray[Any], wire_type: str) -> memoryview:
    wire = np.ascontiguousarray(array.astype(wire_type, copy=False))
    return wire.view(np.uint8).data.toreadonly()


def _scales(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32 [blocks, 1] of uint8 [blocks, 256]."""
    return np.ascontiguousarray(blocks[:, :4]).view("<f4")
