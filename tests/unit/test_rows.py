"""Payloads of changed rows: exactly the changed rows, wherever shards are cut."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.payloads import decoded, joined, magnitudes
from torch import Tensor, nn

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.rows import MIN_ROWS, RowsFormat, Table, tables_of
from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.learning.vector import gather

#: Two tables of three rows among five other numbers.
SMALL = RowsFormat(5 + 3 * 2 + 3, (Table(2, 3, 2), Table(9, 3, 1)))


def payload_of(fmt: RowsFormat, vector: Tensor) -> memoryview:
    return joined(fmt.encode(vector), 64)


def rejected(fmt: RowsFormat, payload: bytes) -> bool:
    if not fmt.fits(len(payload)):
        return True
    try:
        fmt.unpack(memoryview(payload))
    except InvalidUpdate:
        return True
    return False


@st.composite
def formats(draw: st.DrawFn) -> RowsFormat:
    tables, at = [], 0
    for gap, rows, width in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 9)), max_size=4)
    ):
        tables.append(Table(at + gap, rows, width))
        at = tables[-1].stop
    return RowsFormat(at + draw(st.integers(0, 9)), tuple(tables))


def sparse(fmt: RowsFormat, seed: int, share: float) -> Tensor:
    """Return random numbers, with only a share of each table's rows other than zero."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(fmt.floats, generator=generator)
    for table in fmt.tables:
        table.of(vector)[torch.rand(table.rows, generator=generator) >= share] = 0
    return vector


def test_a_payload_by_hand() -> None:
    vector = torch.tensor([1.0, 2.0, 0, 0, 0, -3.0, 0, 0, 4.0, 5.0, 0, 6.0, 7.0, 8.0])

    payload = payload_of(SMALL, vector)

    # row 1 of the first table, rows 0 and 2 of the second; then five numbers, then the rows
    assert bytes(payload) == struct.pack("<5I", 1, 2, 1, 0, 2) + struct.pack(
        "<9f", 1, 2, 4, 7, 8, 0, -3, 5, 6
    )
    assert torch.equal(decoded(SMALL, payload), vector)
    assert SMALL.size == 4 * (2 + 6 + 14)


@given(formats(), st.integers(0, 9), st.floats(0, 1), st.integers(1, 300))
def test_only_changed_rows_are_sent_without_loss(
    fmt: RowsFormat, seed: int, share: float, most: int
) -> None:
    vector = sparse(fmt, seed, share)

    payload = payload_of(fmt, vector)

    assert fmt.fits(len(payload))
    assert not rejected(fmt, bytes(payload))
    assert torch.equal(decoded(fmt, payload, most), vector)
    sent = sum((1 + table.width) * int(table.of(vector).any(1).sum()) for table in fmt.tables)
    assert len(payload) == 4 * (len(fmt.tables) + fmt.dense + sent)


@given(formats(), st.data(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_numbers_that_are_not_finite_are_sent_and_detected(
    fmt: RowsFormat, data: st.DataObject, bad: float
) -> None:
    if fmt.floats == 0:
        return
    vector = sparse(fmt, 0, 0.0)
    vector[data.draw(st.integers(0, fmt.floats - 1))] = bad

    bounds = magnitudes(fmt, payload_of(fmt, vector), 64)

    assert not all(bound <= 1e30 for bound in bounds)


@given(formats(), st.integers(0, 9), st.data())
def test_garbage_is_rejected_or_decodes_to_a_vector(
    fmt: RowsFormat, seed: int, data: st.DataObject
) -> None:
    payload = bytearray(payload_of(fmt, sparse(fmt, seed, 0.5)))
    for _ in range(data.draw(st.integers(1, 4))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    payload += bytes(data.draw(st.sampled_from([0, 0, 0, 1, 4, 40])))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 4, 40]))
    payload = payload[: max(len(payload) - cut, 0)]

    if not rejected(fmt, bytes(payload)):
        numbers = decoded(fmt, memoryview(payload))
        assert numbers.shape == (fmt.floats,)


@pytest.mark.parametrize(
    "words",
    [
        (4, 0),  # more rows than the table has
        (1, 0, 3),  # a row after the last
        (2, 0, 1, 1),  # a repeated row
        (2, 0, 1, 0),  # descending order
        (0, 0, 0),  # one value too many
        (2**32 - 1, 2**32 - 1),
    ],
)
def test_invalid_rows_are_rejected(words: tuple[int, ...]) -> None:
    counts = [min(count, 3) for count in words[:2]]
    numbers = 5 + 2 * counts[0] + counts[1]

    payload = memoryview(struct.pack(f"<{len(words)}I", *words) + bytes(4 * numbers))

    with pytest.raises(InvalidUpdate) as caught:
        SMALL.unpack(payload)

    assert caught.value.reason == "rows"
    assert not rejected(SMALL, struct.pack("<3I", 1, 0, 2) + bytes(4 * 7))


class Words(nn.Module):
    """An embedding tied to the output, a layer with few rows, a statistic, a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.table = nn.Embedding(MIN_ROWS, 5)
        self.out = nn.Linear(5, MIN_ROWS)
        self.out.weight = self.table.weight
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Embedding(MIN_ROWS, 2)
        self.frozen.weight.requires_grad_(False)


def test_a_tied_table_is_listed_once() -> None:
    layout = Layout.of(Words())
    (part,) = Cut(layout.floats, layout.parameters, 1).parts

    assert tables_of(layout, part) == (Table(16, MIN_ROWS, 5),)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.lists(st.integers(0, MIN_ROWS - 1), max_size=12))
def test_a_table_can_be_cut_anywhere(shards: int, touched: list[int]) -> None:
    # Given a model with some changed rows, and running statistics
    model = Words()
    layout = Layout.of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.table.weight[touched] = torch.randn(len(touched), 5)
    floats, _ = gather(model, layout)

    # When each shard is sent separately
    parts = Cut(layout.floats, layout.parameters, shards).parts
    received = [_exchanged(layout, part, floats) for part in parts]

    # Then the shards together are the vector
    assert torch.equal(torch.cat(received), floats)


def _exchanged(layout: Layout, part: ShardRange, vector: Tensor) -> Tensor:
    fmt = RowsFormat(part.floats, tables_of(layout, part))
    payload = payload_of(fmt, part.of(vector))
    assert not rejected(fmt, bytes(payload))
    return decoded(fmt, payload)


def test_empty_rows_are_not_a_table() -> None:
    layout = Layout((TensorEntry("none", (MIN_ROWS, 0), TensorKind.PARAMETER, 0),))

    assert tables_of(layout, ShardRange(0, 0, 0, 0)) == ()
