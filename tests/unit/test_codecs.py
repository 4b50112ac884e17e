"""Dense codecs, lossless or within their error bound, and float32 numbers in two halves."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcasgd.learning.encodings import BFloat16, Codec, Float32
from vcasgd.store.tensors.chunks import join_halves, split_halves, widen

CODECS: list[Codec] = [Float32(), BFloat16()]
vectors = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)


def decoded(codec: Codec, vector: Tensor) -> Tensor:
    payload = memoryview(bytearray(codec.encode(vector)))
    return codec.decode(payload, torch.full((len(vector),), 123.0))


@given(vectors)
def test_float32_loses_nothing(vector: Tensor) -> None:
    assert torch.equal(decoded(Float32(), vector), vector)


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=40))
def test_bfloat16_has_a_relative_error_of_at_most_one_in_256(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32)

    result = decoded(BFloat16(), vector)

    subnormal = 2.0**-134  # half the distance between the smallest numbers of bfloat16
    assert (result - vector).abs().le(vector.abs() * 2**-8 + subnormal).all()
    assert torch.equal(result, vector.bfloat16().float())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_numbers_that_are_not_finite_are_kept(codec: Codec) -> None:
    vector = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])

    result = decoded(codec, vector)

    assert torch.equal(result.isnan(), vector.isnan())
    assert result[1:3].tolist() == [float("inf"), -float("inf")]
    assert result[3].signbit()


def test_the_bytes_are_little_endian() -> None:
    vector = torch.tensor([1.0, -2.5])

    assert bytes(Float32().encode(vector)) == struct.pack("<2f", 1.0, -2.5)
    assert bytes(BFloat16().encode(vector)) == bytes.fromhex("803f20c0")


def test_float32_is_not_copied() -> None:
    vector = torch.zeros(2)

    payload = Float32().encode(vector)
    vector[0] = 1.0

    assert bytes(payload) == struct.pack("<2f", 1.0, 0.0)


def test_a_vector_of_another_type_or_stride_is_converted() -> None:
    strided = torch.arange(6, dtype=torch.float64, requires_grad=True)[::2]

    assert bytes(Float32().encode(strided)) == struct.pack("<3f", 0.0, 2.0, 4.0)


def halves(vector: Tensor) -> tuple[Tensor, Tensor]:
    high, low = (torch.empty(len(vector), dtype=torch.int16) for _ in range(2))
    split_halves(vector, high, low, torch.empty(len(vector), dtype=torch.int32))
    return high, low


def joined(high: Tensor, low: Tensor) -> Tensor:
    out = torch.empty(len(high))
    join_halves(high, low, out, torch.empty(len(high), dtype=torch.int32))
    return out


def bits(vector: Tensor) -> list[int]:
    return vector.view(torch.int32).tolist()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_32_bits_come_back(words: list[int]) -> None:
    """Includes NaN with its payload, infinity, and numbers near them."""
    vector = torch.from_numpy(np.array(words, np.uint32).view(np.float32))

    assert bits(joined(*halves(vector))) == bits(vector)


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=50))
def test_the_high_half_is_as_near_as_the_nearest_bfloat16(values: list[float]) -> None:
    vector = torch.tensor(values)
    high, _ = halves(vector)
    rounded = torch.empty(len(values))
    widen(high, rounded)

    nearest = vector.to(torch.bfloat16).double()
    assert ((rounded.double() - vector).abs() == (nearest - vector).abs()).all()


def test_ties_are_rounded_away_from_zero() -> None:
    vector = torch.tensor([1 + 2**-8, -1 - 2**-8, 0.0, -0.0, 1.0])
    rounded = torch.empty(5)
    widen(halves(vector)[0], rounded)

    assert rounded.tolist() == [1 + 2**-7, -1 - 2**-7, 0.0, -0.0, 1.0]
    assert bits(rounded)[3] == bits(vector)[3], "minus zero stays"
