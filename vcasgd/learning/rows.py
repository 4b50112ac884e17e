"""Updates of models with large tables, such as embeddings: only the rows that changed.

A step of training touches the rows of the samples in its batch, and none of the others, as long as
the optimizer leaves those alone whose gradient is 0. What was touched is seen in the difference
itself: a row of zeros is not sent. Nothing is rounded and nothing kept back.

A payload is little-endian. First, uint32: for each table how many rows follow, and then the numbers
of these rows, ascending. After them, float32: all that is no row of a table, in the order of the
vector, and then the rows of each table. The numbers of rows, read as float32, are tiny, so a chunk
can be looked at for what is not finite without knowing where they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.codecs import Float32
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Layout, TensorEntry, TensorKind

NAME = "rows"
#: of a table; a smaller one is sent as it is, which costs next to nothing
LEAST_ROWS = 256

_WORD = 4


@dataclass(frozen=True)
class Table:
    """Elements ``[start, stop)`` of a shard, which are ``rows`` whole rows of ``width`` numbers."""

    start: int
    rows: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.width

    def of(self, vector: Tensor) -> Tensor:
        """float32 [rows, width], nothing copied."""
        return vector[self.start : self.stop].view(self.rows, self.width)


def tables_of(layout: Layout, part: ShardRange) -> tuple[Table, ...]:
    """The rows that lie in a shard as a whole, of all trained parameters with two dimensions and
    at least :data:`LEAST_ROWS` rows."""
    found = (_table(entry, part) for entry in layout.entries if _is_table(entry))
    return tuple(table for table in found if table.rows > 0)


def _is_table(entry: TensorEntry) -> bool:
    shape = entry.shape
    return (
        entry.kind is TensorKind.PARAMETER
        and len(shape) == 2
        and shape[0] >= LEAST_ROWS
        and entry.size > 0
    )


def _table(entry: TensorEntry, part: ShardRange) -> Table:
    width = entry.shape[1]
    begin = max(part.start - entry.offset, 0)
    end = min(part.stop - entry.offset, entry.size)
    first = -(-begin // width)
    return Table(entry.offset + first * width - part.start, end // width - first, width)


@dataclass(frozen=True)
class Rows:
    """How ``floats`` elements with ``tables`` among them, in order, are encoded."""

    floats: int
    tables: tuple[Table, ...]
    name: str = NAME

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The elements ``[start, stop)`` that are in no table, which are always sent."""
        edges = [0, *(edge for table in self.tables for edge in (table.start, table.stop))]
        pairs = zip(edges[::2], [*edges[1::2], self.floats], strict=True)
        return tuple((start, stop) for start, stop in pairs if start < stop)

    @cached_property
    def dense(self) -> int:
        """Elements that are in no table."""
        return sum(stop - start for start, stop in self.gaps)

    @property
    def size(self) -> int:
        """Bytes where every row is sent."""
        return self._size([table.rows for table in self.tables])

    def fits(self, size: int) -> bool:
        return self._size([0] * len(self.tables)) <= size <= self.size and size % _WORD == 0

    def largest(self, chunk: memoryview, at: int) -> float:  # noqa: ARG002 - all words are alike
        return Float32().largest(chunk)

    def check(self, payload: memoryview) -> None:
        """Raises :class:`InvalidUpdate` with the reason ``rows``."""
        words = np.frombuffer(payload, "<u4")
        counts = [int(count) for count in words[: len(self.tables)]]
        possible = all(n <= table.rows for n, table in zip(counts, self.tables, strict=True))
        if not possible or payload.nbytes != self._size(counts):
            raise InvalidUpdate("the rows are not those of the payload", reason="rows")
        for table, sent in zip(self.tables, RowIndex(self, payload).numbers, strict=True):
            if (sent[1:] <= sent[:-1]).any() or (sent >= table.rows).any():
                raise InvalidUpdate("a row does not exist, or is there twice", reason="rows")

    def pieces(self, most: int) -> Iterator[GapPiece | TablePiece]:
        """All elements, in pieces of at most ``most`` elements or a single row."""
        at = 0
        for start, stop in self.gaps:
            for first in range(start, stop, most):
                last = min(first + most, stop)
                yield GapPiece(self, first, last, at)
                at += last - first
        for number, table in enumerate(self.tables):
            step = max(most // table.width, 1)
            for row in range(0, table.rows, step):
                yield TablePiece(self, number, row, min(row + step, table.rows))

    def scratch(self, most: int) -> Tensor:
        widest = max((table.width for table in self.tables), default=0)
        return torch.empty(max(min(most, self.floats), widest))

    def _size(self, counts: Sequence[int]) -> int:
        pairs = zip(counts, self.tables, strict=True)
        rows = sum(count * (1 + table.width) for count, table in pairs)
        return _WORD * (len(self.tables) + rows + self.dense)


class RowIndex:
    """Where what is in a payload; only of one that was checked, or is being."""

    def __init__(self, wire: Rows, payload: memoryview) -> None:
        self._words = np.frombuffer(payload, "<u4")
        tables = wire.tables
        counts = [int(count) for count in self._words[: len(tables)]]
        edges = np.cumsum([len(tables), *counts])
        #: of each table the rows that were sent, ascending
        self.numbers = [self._words[a:b] for a, b in pairwise(edges)]
        self._dense = int(edges[-1])
        sizes = [count * table.width for count, table in zip(counts, tables, strict=True)]
        self._starts = np.cumsum([self._dense + wire.dense, *sizes])

    def gap(self, at: int, length: int) -> NDArray[np.float32]:
        """Elements that are in no table, from the one numbered ``at`` on."""
        start = self._dense + at
        return self._words[start : start + length].view("<f4")

    def rows(self, table: int, width: int, first: int, last: int) -> NDArray[np.float32]:
        """float32 [last − first, width] of a table: the rows sent as its number ``first`` to
        ``last``."""
        start = int(self._starts[table])
        found = self._words[start + first * width : start + last * width].view("<f4")
        return found.reshape(-1, width)


@dataclass(frozen=True)
class GapPiece:
    """Elements ``[start, stop)`` that are in no table, ``at`` of those before them."""

    wire: Rows
    start: int
    stop: int
    at: int

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = scratch[: self.stop - self.start]
        out.numpy()[:] = RowIndex(self.wire, payload).gap(self.at, len(out))
        return out


@dataclass(frozen=True)
class TablePiece:
    """Rows ``[first, last)`` of a table; those that were not sent are 0."""

    wire: Rows
    number: int
    first: int
    last: int

    @property
    def table(self) -> Table:
        return self.wire.tables[self.number]

    @property
    def start(self) -> int:
        return self.table.start + self.first * self.table.width

    @property
    def stop(self) -> int:
        return self.table.start + self.last * self.table.width

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        index, width = RowIndex(self.wire, payload), self.table.width
        sent = index.numbers[self.number]
        begin, end = (int(at) for at in np.searchsorted(sent, (self.first, self.last)))
        out = scratch[: self.stop - self.start].zero_()
        places = sent[begin:end].astype(np.int64) - self.first
        out.view(-1, width).numpy()[places] = index.rows(self.number, width, begin, end)
        return out


class RowsEncoding:
    """A vector whose changed rows were looked for and copied; it may change afterwards."""

    codec = NAME

    def __init__(self, wire: Rows, vector: Tensor) -> None:
        """Raises nothing: what is not finite counts as changed."""
        vector = vector.detach().to("cpu", torch.float32)
        self._bytes = _joined(list(_arrays(wire, vector)))

    def __len__(self) -> int:
        return self._bytes.nbytes

    def chunks(self, size: int) -> Iterator[memoryview]:
        for at in range(0, len(self), size):
            yield self._bytes[at : at + size]


def _arrays(wire: Rows, vector: Tensor) -> Iterator[NDArray[np.generic]]:
    """What a payload is made of."""
    tables = [table.of(vector) for table in wire.tables]
    changed = [(table != 0).any(1).nonzero().view(-1) for table in tables]
    yield np.array([len(rows) for rows in changed], "<u4")
    yield from (rows.numpy().astype("<u4") for rows in changed)
    numbers = [vector[start:stop] for start, stop in wire.gaps]
    numbers += [table[rows] for table, rows in zip(tables, changed, strict=True)]
    yield from (each.numpy().astype("<f4", copy=False) for each in numbers)


def _joined(arrays: Iterable[NDArray[np.generic]]) -> memoryview:
    return np.concatenate([each.reshape(-1).view(np.uint8) for each in arrays]).data.toreadonly()
