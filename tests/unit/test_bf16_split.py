"""Splitting float32 numbers into bfloat16 halves."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcasgd.store.tensors.chunks import join_halves, split_halves, widen


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
