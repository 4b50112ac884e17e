"""Packed payloads: nothing is lost, and nothing that doesn't fit gets through."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.blocks import BlockFormat
from vcasgd.learning.encodings.low_bits import Int2
from vcasgd.learning.encodings.packed import PackedFormat

FORMAT = PackedFormat(BlockFormat(Int2(), 5000, 4900))


def payload_of(fmt: PackedFormat, vector: Tensor, chunk: int = 1024) -> bytes:
    return b"".join(fmt.encode(vector).chunks(chunk))


def deflated(plain: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(plain) + packer.flush()


def reason_of(payload: bytes | bytearray) -> str | None:
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
    vector = torch.randn(floats, generator=torch.Generator().manual_seed(seed))

    packed = payload_of(fmt, vector, chunk)

    assert fmt.fits(len(packed))
    assert len(packed) == len(fmt.encode(vector))
    plain = b"".join(inner.encode(vector).chunks(1 << 20))
    assert bytes(fmt.unpack(memoryview(packed))) == plain


@given(st.binary(max_size=40_000))
def test_bytes_that_cannot_be_packed_fit(plain: bytes) -> None:
    """The largest payload has room for the worst bytes."""
    fmt = PackedFormat(BlockFormat(Int2(), 0, 0))
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
    packed = packer.compress(plain) + packer.flush()

    assert len(packed) <= fmt.size + len(plain) + len(plain) // 1024


def test_a_payload_that_unpacks_to_another_length_is_refused() -> None:
    honest = payload_of(FORMAT, torch.ones(5000))
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

    assert reason_of(payload_of(FORMAT, vector)) == "non-finite"


@given(st.data())
def test_a_changed_payload_is_refused_or_decodes(data: st.DataObject) -> None:
    vector = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    raw = bytearray(payload_of(FORMAT, vector))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if (reason := reason_of(raw)) is not None:
        assert reason in ("packing", "non-finite")
        return
    plain = FORMAT.unpack(memoryview(raw))
    scratch = FORMAT.scratch(1000)
    for piece in FORMAT.pieces(1000):
        assert piece.decode(plain, scratch).isfinite().all()
