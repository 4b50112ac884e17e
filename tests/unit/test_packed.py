"""The codec of a few levels, and its payloads: nothing is lost, and nothing else gets through."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.payloads import decoded, joined, random
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.blocks import BlockFormat
from vcasgd.learning.encodings.low_bits import Int2
from vcasgd.learning.encodings.packed import PackedFormat

FORMAT = PackedFormat(BlockFormat(Int2(), 5000, 4900))


def deflated(plain: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(plain) + packer.flush()


def reason_of(payload: bytes | bytearray | memoryview) -> str | None:
    try:
        FORMAT.unpack(memoryview(payload))
    except InvalidUpdate as error:
        return error.reason
    return None


@given(
    st.integers(0, 3000),
    st.floats(0, 1),
    st.integers(0, 2**32),
    st.sampled_from([256, 1024, 1 << 20]),
)
def test_packing_loses_nothing(floats: int, share: float, seed: int, chunk: int) -> None:
    inner = BlockFormat(Int2(), floats, int(share * floats))
    fmt = PackedFormat(inner)
    vector = random(floats, seed)

    packed = joined(fmt.encode(vector), chunk)

    assert fmt.fits(len(packed))
    assert fmt.unpack(packed) == joined(inner.encode(vector), 1 << 20)


@given(st.binary(max_size=40_000))
def test_bytes_that_cannot_be_packed_fit(plain: bytes) -> None:
    """The largest payload has room for the worst bytes."""
    fmt = PackedFormat(BlockFormat(Int2(), 0, 0))
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
    packed = packer.compress(plain) + packer.flush()

    assert len(packed) <= fmt.size + len(plain) + len(plain) // 1024


def test_a_payload_that_unpacks_to_another_length_is_refused() -> None:
    honest = bytes(joined(FORMAT.encode(torch.ones(5000))))
    plain = bytes(FORMAT.unpack(memoryview(honest)))

    assert reason_of(honest) is None
    assert reason_of(deflated(plain)) is None
    # A megabyte of zeros has a thousand bytes, but is never unpacked as a whole.
    bad = [b"", b"x" * 50, honest[:-1], honest + b"x", deflated(plain[:-1]), deflated(plain + b"x"),
           deflated(bytes(1 << 20))]  # fmt: skip
    assert {reason_of(each) for each in bad} == {"packing"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4950], ids=["parameter", "statistic"])
def test_numbers_that_are_none_are_found(bad: float, place: int) -> None:
    vector = torch.ones(5000)
    vector[place] = bad

    assert reason_of(joined(FORMAT.encode(vector))) == "non-finite"


@given(st.data())
def test_a_changed_payload_is_refused_or_decodes(data: st.DataObject) -> None:
    raw = bytearray(joined(FORMAT.encode(random(5000))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if (reason := reason_of(raw)) is not None:
        assert reason in ("packing", "non-finite")
        return
    assert decoded(FORMAT, FORMAT.unpack(memoryview(raw)), 1000).isfinite().all()


# --- the codec ----------------------------------------------------------------------------------

CODEC = Int2()
vectors = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=1500).map(torch.tensor)


def numbers_of(vector: Tensor) -> Tensor:
    fmt = BlockFormat(CODEC, len(vector), len(vector))
    return decoded(fmt, joined(fmt.encode(vector)))


def relative_error(vector: Tensor) -> float:
    lost = numbers_of(vector) - vector
    return float(lost.norm() / vector.norm())


def test_a_block_by_hand() -> None:
    payload = bytes(Int2().encode(torch.tensor([4.0, -4.0, 0.1, 2.0])))

    # The scale is 2, bfloat16 0x4000. The codes are 2, -2, 0, 1, and 2 is added to each.
    assert payload[:4] == bytes((0x00, 0x40, 4 * 25 + 0 * 5 + 2, 3 * 25 + 2 * 5 + 2))
    assert set(payload[4:]) == {2 * 25 + 2 * 5 + 2}


def test_the_scale_trades_error_for_bits() -> None:
    """The error of the best uniform quantizer (Max 1960) is 0.283, where the codes of normal
    numbers pack into 2.2 bits."""
    vector = random(1 << 16)
    packed = PackedFormat(BlockFormat(CODEC, len(vector), len(vector))).encode(vector)

    assert relative_error(vector * 1e-6) <= 0.31
    assert 8 * len(packed) / len(vector) <= 2.15


def test_numbers_of_one_size_and_a_single_number_in_a_block_are_kept() -> None:
    """Not all of them may be rounded to 0, in this update and in all that follow."""
    alone = torch.zeros(700)
    alone[123] = -5e-7

    assert relative_error(random(2000).sign() * 1e-3) <= 2**-8
    assert relative_error(alone) <= 2**-8


@given(vectors)
def test_an_update_never_grows_by_its_encoding(vector: Tensor) -> None:
    result = numbers_of(vector)

    assert result.isfinite().all()
    if len(vector):
        # The outermost level may be rounded up to bfloat16.
        assert result.abs().max() <= 1.01 * max(vector.abs().max().item(), 1e-30) * 2
        assert CODEC.max_magnitude(CODEC.encode(vector)) >= result.abs().max().item()


def test_tiny_numbers_become_zero() -> None:
    assert not numbers_of(torch.full((5,), 1e-40)).any()
