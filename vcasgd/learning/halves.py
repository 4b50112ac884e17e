"""A float32 number as two halves: its nearest bfloat16, and what is missing from it.

Whoever makes do with bfloat16 reads the high half alone; both together are the number exactly.
With its bits as an int32, the high half is ``(bits + 0x8000) >> 16``, rounded half away from
zero, and the low half is the low 16 bits taken as a signed number; so ``(high << 16) + low``
gives the bits back, in arithmetic modulo 2³². Rounding overflows to infinity only beyond 3.39e38.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split(vector: Tensor, high: Tensor, low: Tensor, scratch: Tensor) -> None:
    """float32 ``[n]`` into two int16 ``[n]``; ``scratch`` is int32 ``[n]``. All contiguous."""
    bits = vector.view(torch.int32)
    torch.add(bits, 0x8000, out=scratch)
    high.copy_(scratch.bitwise_right_shift_(16))
    low.copy_(bits)


def join(high: Tensor, low: Tensor, out: Tensor, scratch: Tensor) -> None:
    """The inverse of :func:`split`."""
    bits = out.view(torch.int32)
    bits.copy_(high).bitwise_left_shift_(16)
    bits.add_(scratch.copy_(low))


def widen(high: Tensor, out: Tensor) -> None:
    """The high halves alone, int16 ``[n]``, as float32 ``[n]``."""
    out.copy_(high.view(torch.bfloat16))
