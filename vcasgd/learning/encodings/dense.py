"""Dense codecs: every number of a vector, each in the same number of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.learning.encodings.payload import Codec


class Float32(Codec):
    """float32 as it is: four bytes per element, no loss, no copy."""

    name = "float32"
    block_floats, block_bytes = 1, 4
    for_statistics = True

    def encode(self, vector: Tensor) -> memoryview:
        """Return the bytes, which share the memory of a contiguous float32 vector on the CPU."""
        return _bytes_of(vector.detach().to("cpu", torch.float32).numpy(), "<f4")

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:  # noqa: ARG002 - no copy
        return torch.frombuffer(payload, dtype=torch.float32)

    def max_magnitude(self, payload: bytes | memoryview) -> float:
        numbers = np.frombuffer(payload, "<f4")
        # max and min both propagate NaN
        return float(max(np.max(numbers), -np.min(numbers))) if len(numbers) else 0.0


class BFloat16(Codec):
    """The upper half of a float32, rounded to nearest, ties to even: two bytes per element.

    The relative error is at most 2⁻⁸ for normal numbers; the range is that of float32.
    """

    name = "bfloat16"
    block_floats, block_bytes = 1, 2
    for_statistics = True

    def encode(self, vector: Tensor) -> memoryview:
        """Return a copy."""
        # NumPy has no bfloat16, so its bits are handled as int16
        bits = vector.detach().to("cpu", torch.bfloat16).view(torch.int16)
        return _bytes_of(bits.numpy(), "<i2")

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        # torch converts with vector instructions; NumPy has to widen before it shifts
        numbers = torch.frombuffer(payload, dtype=torch.bfloat16)
        return self._target(payload, scratch).copy_(numbers)

    def max_magnitude(self, payload: bytes | memoryview) -> float:
        bits = np.frombuffer(payload, "<u2")
        # among numbers of one sign, a larger magnitude has larger bits, and NaN the largest;
        # negative numbers are the largest as uint16, positive ones as int16
        negative = int(np.max(bits, initial=0x8000)) & 0x7FFF
        positive = int(np.max(bits.view("<i2"), initial=0))
        return float(np.uint32(max(negative, positive) << 16).view(np.float32))


class Int8(Codec):
    """Blockwise quantization to int8 (Dettmers 2021, arXiv 2110.02861).

    A block has 252 numbers in 256 bytes: the scale ``s = max|x|/127`` as a float32, then
    ``round(x/s)`` as one byte each. The last block is padded with zeros.

    The error of a number is at most s/2, 1/254 of the largest number in its block, so small
    numbers next to large ones become 0. Use it for differences, whose loss is added to the next
    update (:class:`~vcasgd.learning.encodings.blocks.ErrorFeedback`), and not for running
    statistics. The scale of a block is not finite if any of its numbers is not. A block without a
    number above 1.5e-36 decodes to zeros.
    """

    name = "int8"
    block_floats, block_bytes = 252, 256

    def encode(self, vector: Tensor) -> memoryview:
        """Return a copy."""
        numbers = vector.detach().to("cpu", torch.float32)
        padding = -len(numbers) % self.block_floats
        count = (len(numbers) + padding) // self.block_floats
        rows = torch.nn.functional.pad(numbers, (0, padding)).view(count, self.block_floats)
        least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        # amin, amax and maximum all propagate NaN
        scales = torch.maximum(most, -least) / 127
        # a block whose scale underflows or is not finite is encoded as zeros
        usable = (scales >= torch.finfo(torch.float32).tiny) & scales.isfinite()
        quotients = rows * torch.where(usable, 1 / scales, 0)
        quotients.round_().clamp_(-127, 127).nan_to_num_(0)
        blocks = np.empty((len(rows), self.block_bytes), np.uint8)
        blocks[:, :4] = scales.numpy().astype("<f4").view(np.uint8)
        blocks[:, 4:] = quotients.to(torch.int8).numpy().view(np.uint8)
        return blocks.reshape(-1).data.toreadonly()

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = self._target(payload, scratch)
        target = out.numpy().reshape(-1, self.block_floats)
        blocks = np.frombuffer(payload, np.uint8).reshape(-1, self.block_bytes)
        # garbage gets here only if its magnitude was not checked before
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(blocks[:, 4:].view(np.int8), _scales(blocks), out=target)
        return out

    def max_magnitude(self, payload: bytes | memoryview) -> float:
        scales = _scales(np.frombuffer(payload, np.uint8).reshape(-1, self.block_bytes))
        # -128 is a valid byte, although correct workers never send it
        return 128 * float(np.max(np.abs(scales))) if len(scales) else 0.0


def _bytes_of(array: NDArray[Any], dtype: str) -> memoryview:
    encoded = np.ascontiguousarray(array.astype(dtype, copy=False))
    return encoded.view(np.uint8).data.toreadonly()


def _scales(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the scales, float32 ``[blocks, 1]``, of uint8 ``[blocks, 256]``."""
    return np.ascontiguousarray(blocks[:, :4]).view("<f4")
