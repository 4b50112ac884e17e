"""Updates of embedding tables: the touched rows, wherever a shard was cut, and nothing else."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.rows import LEAST_ROWS, Rows, RowsEncoding, Table, tables_of
from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.learning.vector import Layout, TensorEntry, TensorKind, gather

#: two tables of three rows among five other numbers
SMALL = Rows(5 + 3 * 2 + 3, (Table(2, 3, 2), Table(9, 3, 1)))


def payload_of(wire: Rows, vector: Tensor, chunk: int = 64) -> memoryview:
    encoding = RowsEncoding(wire, vector)
    chunks = [bytes(each) for each in encoding.chunks(chunk)]
    assert all(len(each) == chunk for each in chunks[:-1])
    payload = memoryview(bytearray(b"".join(chunks)))
    assert len(payload) == len(encoding)
    return payload


def decoded(wire: Rows, payload: memoryview, most: int = 50) -> Tensor:
    out, scratch = torch.full((wire.floats,), math.nan), wire.scratch(most)
    for piece in wire.pieces(most):
        out[piece.start : piece.stop] = piece.decoded(payload, scratch)
    return out


def refused(wire: Rows, payload: bytes) -> bool:
    if not wire.fits(len(payload)):
        return True
    try:
        wire.check(memoryview(payload))
    except InvalidUpdate:
        return True
    return False


@st.composite
def wires(draw: st.DrawFn) -> Rows:
    tables, at = [], 0
    for gap, rows, width in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 9)), max_size=4)
    ):
        tables.append(Table(at + gap, rows, width))
        at = tables[-1].stop
    return Rows(at + draw(st.integers(0, 9)), tuple(tables))


def sparse(wire: Rows, seed: int, share: float) -> Tensor:
    """Of each table a share of the rows; all of the other numbers."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(wire.floats, generator=generator)
    for table in wire.tables:
        table.of(vector)[torch.rand(table.rows, generator=generator) >= share] = 0
    return vector


def test_a_payload_by_hand() -> None:
    vector = torch.tensor([1.0, 2.0, 0, 0, 0, -3.0, 0, 0, 4.0, 5.0, 0, 6.0, 7.0, 8.0])

    payload = payload_of(SMALL, vector)

    # one row of the first table, its second; two of the other; then the five, then the rows
    assert bytes(payload) == struct.pack("<5I", 1, 2, 1, 0, 2) + struct.pack(
        "<9f", 1, 2, 4, 7, 8, 0, -3, 5, 6
    )
    assert torch.equal(decoded(SMALL, payload), vector)
    assert SMALL.size == 4 * (2 + 6 + 14)


@settings(deadline=None)
@given(wires(), st.integers(0, 9), st.floats(0, 1), st.integers(1, 300))
def test_nothing_is_lost_and_only_what_changed_is_sent(
    wire: Rows, seed: int, share: float, most: int
) -> None:
    vector = sparse(wire, seed, share)

    payload = payload_of(wire, vector)

    assert wire.fits(len(payload))
    assert not refused(wire, bytes(payload))
    assert torch.equal(decoded(wire, payload, most), vector)
    sent = sum((1 + table.width) * int(table.of(vector).any(1).sum()) for table in wire.tables)
    assert len(payload) == 4 * (len(wire.tables) + wire.dense + sent)


@settings(deadline=None)
@given(wires(), st.data(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_is_sent_and_found(wire: Rows, data: st.DataObject, bad: float) -> None:
    if wire.floats == 0:
        return
    vector = sparse(wire, 0, 0.0)
    vector[data.draw(st.integers(0, wire.floats - 1))] = bad

    payload = payload_of(wire, vector)

    bounds = [wire.largest(payload[at : at + 64], at) for at in range(0, len(payload), 64)]
    assert not all(bound <= 1e30 for bound in bounds)


@settings(deadline=None)
@given(wires(), st.integers(0, 9), st.data())
def test_garbage_is_refused_or_is_numbers(wire: Rows, seed: int, data: st.DataObject) -> None:
    payload = bytearray(payload_of(wire, sparse(wire, seed, 0.5)))
    for _ in range(data.draw(st.integers(1, 4))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    payload += bytes(data.draw(st.sampled_from([0, 0, 0, 1, 4, 40])))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 4, 40]))
    payload = payload[: max(len(payload) - cut, 0)]

    if not refused(wire, bytes(payload)):
        # whatever it is, it is a vector
        numbers = decoded(wire, memoryview(payload))
        assert numbers.shape == (wire.floats,)


@pytest.mark.parametrize(
    "words",
    [
        (4, 0),  # more rows than there are
        (1, 0, 3),  # a row behind the last
        (2, 0, 1, 1),  # one row twice
        (2, 0, 1, 0),  # in the wrong order
        (0, 0, 0),  # a number too many
        (2**32 - 1, 2**32 - 1),
    ],
)
def test_rows_that_can_not_be_are_refused(words: tuple[int, ...]) -> None:
    counts = [min(count, 3) for count in words[:2]]
    numbers = 5 + 2 * counts[0] + counts[1]

    payload = memoryview(struct.pack(f"<{len(words)}I", *words) + bytes(4 * numbers))

    with pytest.raises(InvalidUpdate) as caught:
        SMALL.check(payload)

    assert caught.value.reason == "rows"
    assert not refused(SMALL, struct.pack("<3I", 1, 0, 2) + bytes(4 * 7))


class Words(nn.Module):
    """An embedding, tied to the output; a wide layer of few rows, and a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.table = nn.Embedding(LEAST_ROWS, 5)
        self.out = nn.Linear(5, LEAST_ROWS)
        self.out.weight = self.table.weight
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Embedding(LEAST_ROWS, 2)
        self.frozen.weight.requires_grad_(False)


def test_tables_are_found_in_the_layout_once() -> None:
    layout = Layout.of(Words())
    (part,) = Cut(layout.floats, layout.parameters, 1, layout.sent).parts

    assert tables_of(layout, part) == (Table(16, LEAST_ROWS, 5),)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.lists(st.integers(0, LEAST_ROWS - 1), max_size=12))
def test_a_table_may_be_cut_anywhere(shards: int, touched: list[int]) -> None:
    # Given a model of which some rows were touched, and running statistics
    model = Words()
    layout = Layout.of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.table.weight[touched] = torch.randn(len(touched), 5)
    floats, integers = torch.empty(layout.floats), torch.empty(layout.integers, dtype=torch.int64)
    gather(model, layout, floats, integers)

    # When each shard is sent by itself
    parts = Cut(layout.floats, layout.parameters, shards, layout.sent).parts
    received = [_exchanged(layout, part, floats) for part in parts]

    # Then together they are what was sent
    assert torch.equal(torch.cat(received), floats[: layout.sent])


def _exchanged(layout: Layout, part: ShardRange, vector: Tensor) -> Tensor:
    wire = Rows(part.sent, tables_of(layout, part))
    payload = payload_of(wire, part.sent_of(vector))
    assert not refused(wire, bytes(payload))
    return decoded(wire, payload)


def test_rows_that_are_empty_are_no_table() -> None:
    layout = Layout((TensorEntry("none", (LEAST_ROWS, 0), TensorKind.PARAMETER, 0),))

    assert tables_of(layout, ShardRange(0, 0, 0, 0, 0)) == ()
