"""Codecs of a few levels: their error, their size, and that nothing is lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings import make_codec
from vcasgd.learning.encodings.blocks import BlockFormat, ErrorFeedback
from vcasgd.learning.encodings.low_bits import Int2, Int4, LowBits, Ternary
from vcasgd.learning.encodings.packed import PackedFormat

CODECS: list[LowBits] = [Int4(), Int2(), Ternary()]
codecs = st.sampled_from(CODECS)
vectors = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=1500).map(torch.tensor)


def decoded(codec: LowBits, payload: bytes | memoryview) -> Tensor:
    scratch = torch.full((len(payload) // codec.block_bytes * codec.block_floats,), math.nan)
    return codec.decode_chunk(memoryview(payload), scratch)


def relative_error(codec: LowBits, vector: Tensor) -> float:
    lost = decoded(codec, codec.encode(vector))[: len(vector)] - vector
    return float(lost.norm() / vector.norm())


def test_a_block_of_ternary_by_hand() -> None:
    payload = bytes(Ternary().encode(torch.tensor([2.0, -2.0, 0.1, 0.0, 2.0])))

    # The scale is 2, bfloat16 0x4000. The codes are 1, -1, 0, 0, 1, and 1 is added to each.
    assert payload[:3] == bytes((0x00, 0x40, 2 * 81 + 0 * 27 + 1 * 9 + 1 * 3 + 2))
    assert set(payload[3:]) == {1 * 81 + 1 * 27 + 1 * 9 + 1 * 3 + 1}


@pytest.mark.parametrize(("codec", "bits"), [("int4", 4.07), ("int2", 2.71), ("ternary", 1.63)])
def test_the_bits_of_a_number(codec: str, bits: float) -> None:
    floats = 1 << 20

    assert 8 * make_codec(codec).encoded_size(floats) / floats == pytest.approx(bits, abs=0.01)


@pytest.mark.parametrize(
    ("codec", "error", "bits"),
    [(Int4(), 0.15, 3.25), (Int2(), 0.31, 2.15), (Ternary(), 0.445, 1.6)],
    ids=["int4", "int2", "ternary"],
)
def test_the_scale_trades_error_for_bits(codec: LowBits, error: float, bits: float) -> None:
    """The errors of the best uniform quantizers (Max 1960) are 0.107, 0.283, and 0.436, where the
    codes of normal numbers pack into 3.6, 2.2, and 1.6 bits."""
    vector = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    packed = PackedFormat(BlockFormat(codec, len(vector), len(vector))).encode(vector)

    assert relative_error(codec, vector * 1e-6) <= error
    assert 8 * len(packed) / len(vector) <= bits


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_numbers_of_one_size_are_kept(codec: LowBits) -> None:
    """Not all of them may be rounded to 0, in this update and in all that follow."""
    vector = torch.randn(2000, generator=torch.Generator().manual_seed(0)).sign() * 1e-3

    assert relative_error(codec, vector) <= 2**-8


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_single_number_in_a_block_is_kept(codec: LowBits) -> None:
    vector = torch.zeros(700)
    vector[123] = -5e-7

    assert relative_error(codec, vector) <= 2**-8


@settings(deadline=None)
@given(codecs, vectors)
def test_an_update_never_grows_by_its_encoding(codec: LowBits, vector: Tensor) -> None:
    result = decoded(codec, codec.encode(vector))[: len(vector)]

    assert result.isfinite().all()
    if len(vector):
        # The outermost level may be rounded up to bfloat16.
        assert result.abs().max() <= 1.01 * max(vector.abs().max().item(), 1e-30) * 2
        assert codec.max_magnitude(codec.encode(vector)) >= result.abs().max().item()


@settings(deadline=None)
@given(codecs, st.binary(min_size=128, max_size=128))
def test_any_block_decodes_within_its_magnitude(codec: LowBits, block: bytes) -> None:
    largest = codec.max_magnitude(block)

    if largest <= 1e30:
        assert decoded(codec, block).abs().max() <= largest


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_found(codec: LowBits, bad: float) -> None:
    vector = torch.ones(2000)
    vector[1500] = bad

    assert not codec.max_magnitude(codec.encode(vector)) <= 1e30


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_tiny_numbers_become_zero(codec: LowBits) -> None:
    assert not decoded(codec, codec.encode(torch.full((5,), 1e-40))).any()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_payload_that_does_not_fit_is_refused(codec: LowBits) -> None:
    for size in (127, 256):
        with pytest.raises(InvalidUpdate):
            codec.decode(bytes(size), torch.empty(codec.block_floats))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_what_was_not_sent_is_sent_later(codec: LowBits) -> None:
    feedback = ErrorFeedback(BlockFormat(codec, 1000, 1000))
    generator = torch.Generator().manual_seed(0)
    sent, total = torch.zeros(1000), torch.zeros(1000)
    for _ in range(20):
        update = torch.randn(1000, generator=generator)
        total += update
        payload = b"".join(feedback.encode(update).chunks(4096))
        sent += decoded(codec, payload)[:1000]

    assert torch.allclose(sent + feedback.residual, total, atol=1e-4)
    # What is kept back is no more than the noise of a few updates.
    assert feedback.residual.norm() <= 2 * update.norm()
