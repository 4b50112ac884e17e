"""The codec of a few levels: its error, its size, and that nothing is lost."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcasgd.learning.encodings.blocks import BlockFormat
from vcasgd.learning.encodings.low_bits import Int2
from vcasgd.learning.encodings.packed import PackedFormat

CODEC = Int2()
vectors = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=1500).map(torch.tensor)


def decoded(payload: bytes | memoryview) -> Tensor:
    scratch = torch.full((len(payload) // CODEC.block_bytes * CODEC.block_floats,), math.nan)
    return CODEC.decode(memoryview(payload), scratch)


def relative_error(vector: Tensor) -> float:
    lost = decoded(CODEC.encode(vector))[: len(vector)] - vector
    return float(lost.norm() / vector.norm())


def test_a_block_by_hand() -> None:
    payload = bytes(Int2().encode(torch.tensor([4.0, -4.0, 0.1, 2.0])))

    # The scale is 2, bfloat16 0x4000. The codes are 2, -2, 0, 1, and 2 is added to each.
    assert payload[:4] == bytes((0x00, 0x40, 4 * 25 + 0 * 5 + 2, 3 * 25 + 2 * 5 + 2))
    assert set(payload[4:]) == {2 * 25 + 2 * 5 + 2}


def test_the_scale_trades_error_for_bits() -> None:
    """The error of the best uniform quantizer (Max 1960) is 0.283, where the codes of normal
    numbers pack into 2.2 bits."""
    vector = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    packed = PackedFormat(BlockFormat(CODEC, len(vector), len(vector))).encode(vector)

    assert relative_error(vector * 1e-6) <= 0.31
    assert 8 * len(packed) / len(vector) <= 2.15


def test_numbers_of_one_size_are_kept() -> None:
    """Not all of them may be rounded to 0, in this update and in all that follow."""
    vector = torch.randn(2000, generator=torch.Generator().manual_seed(0)).sign() * 1e-3

    assert relative_error(vector) <= 2**-8


def test_a_single_number_in_a_block_is_kept() -> None:
    vector = torch.zeros(700)
    vector[123] = -5e-7

    assert relative_error(vector) <= 2**-8


@given(vectors)
def test_an_update_never_grows_by_its_encoding(vector: Tensor) -> None:
    result = decoded(CODEC.encode(vector))[: len(vector)]

    assert result.isfinite().all()
    if len(vector):
        # The outermost level may be rounded up to bfloat16.
        assert result.abs().max() <= 1.01 * max(vector.abs().max().item(), 1e-30) * 2
        assert CODEC.max_magnitude(CODEC.encode(vector)) >= result.abs().max().item()


def test_tiny_numbers_become_zero() -> None:
    assert not decoded(CODEC.encode(torch.full((5,), 1e-40))).any()
