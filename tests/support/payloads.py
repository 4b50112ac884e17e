"""Payloads of updates, encoded and decoded as workers and servers do: in chunks and pieces."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcasgd.learning.encodings.payload import EncodedVector, PayloadFormat


def joined(encoding: EncodedVector, chunk: int = 4096) -> memoryview:
    """Return a payload from its chunks, of which all but the last have the full length."""
    chunks = [bytes(each) for each in encoding.chunks(chunk)]
    assert all(len(each) == chunk for each in chunks[:-1])
    payload = memoryview(bytearray(b"".join(chunks)))
    assert len(payload) == len(encoding)
    return payload


def decoded(fmt: PayloadFormat, payload: memoryview, most: int = 600) -> Tensor:
    """Return the vector of a payload, float32, decoded in pieces of at most ``most`` numbers."""
    pieces, scratch = list(fmt.pieces(most)), fmt.scratch(most)
    out = torch.full((max((piece.stop for piece in pieces), default=0),), math.nan)
    for piece in pieces:
        out[piece.start : piece.stop] = piece.decode(payload, scratch)
    return out


def magnitudes(fmt: PayloadFormat, payload: memoryview, chunk: int = 4096) -> list[float]:
    """Return the bound of the numbers in each chunk of a payload."""
    starts = range(0, len(payload), chunk)
    return [fmt.max_magnitude(payload[at : at + chunk], at) for at in starts]


def random(floats: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers, float32."""
    return torch.randn(floats, generator=torch.Generator().manual_seed(seed))
