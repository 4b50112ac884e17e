"""Payloads of changed rows, for models with large tables such as embeddings.

A training step changes only the rows of the samples in its batch, provided that the optimizer
leaves rows with a zero gradient alone. The difference itself shows which rows changed: a row of
zeros is not sent. Nothing is rounded, and there is no residual.

A payload is little-endian. It starts with uint32 words: the number of rows of each table, then the
indices of these rows, ascending. float32 values follow: all elements outside tables, in the order
of the vector, then the rows of each table. Row indices read as float32 are tiny, so a chunk can be
checked for non-finite numbers without knowing where the indices end.
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
from vcasgd.learning.encodings import Float32
from vcasgd.learning.encodings.payload import EncodedBytes
from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.learning.shards import ShardRange

NAME = "rows"
#: Rows of the smallest table; a smaller one is sent whole, which costs next to nothing.
MIN_ROWS = 256

_WORD = 4


@dataclass(frozen=True)
class Table:
    """Elements ``[start, stop)`` of a shard that form ``rows`` whole rows of ``width`` numbers."""

    start: int
    rows: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.width

    def of(self, vector: Tensor) -> Tensor:
        """Return a view, float32 ``[rows, width]``."""
        return vector[self.start : self.stop].view(self.rows, self.width)


def tables_of(layout: Layout, part: ShardRange) -> tuple[Table, ...]:
    """Return the tables in a shard.

    A table is the rows that the shard contains whole of a trained parameter with two dimensions
    and at least :data:`MIN_ROWS` rows.
    """
    tables = (_table(entry, part) for entry in layout.entries if _is_table(entry))
    return tuple(table for table in tables if table.rows > 0)


def _is_table(entry: TensorEntry) -> bool:
    shape = entry.shape
    return (
        entry.kind is TensorKind.PARAMETER
        and len(shape) == 2
        and shape[0] >= MIN_ROWS
        and entry.size > 0
    )


def _table(entry: TensorEntry, part: ShardRange) -> Table:
    width = entry.shape[1]
    begin = max(part.start - entry.offset, 0)
    end = min(part.stop - entry.offset, entry.size)
    first = -(-begin // width)
    return Table(entry.offset + first * width - part.start, end // width - first, width)


@dataclass(frozen=True)
class RowsFormat:
    """Format of a vector of ``floats`` elements that contains ``tables``, in order."""

    floats: int
    tables: tuple[Table, ...]
    name: str = NAME

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Elements ``[start, stop)`` outside tables, which are always sent."""
        edges = [0, *(edge for table in self.tables for edge in (table.start, table.stop))]
        pairs = zip(edges[::2], [*edges[1::2], self.floats], strict=True)
        return tuple((start, stop) for start, stop in pairs if start < stop)

    @cached_property
    def dense(self) -> int:
        """Number of elements outside tables."""
        return sum(stop - start for start, stop in self.gaps)

    @property
    def size(self) -> int:
        """Bytes of a payload with every row."""
        return self._size([table.rows for table in self.tables])

    def encode(self, vector: Tensor) -> EncodedBytes:
        """Return a copy of the changed rows; one with a number that is not finite has changed."""
        return EncodedBytes(NAME, _joined(_arrays(self, vector.detach().to("cpu", torch.float32))))

    def fits(self, size: int) -> bool:
        return self._size([0] * len(self.tables)) <= size <= self.size and size % _WORD == 0

    def max_magnitude(self, chunk: memoryview, at: int) -> float:  # noqa: ARG002 - all alike
        return Float32().max_magnitude(chunk)

    def unpack(self, payload: memoryview) -> memoryview:
        """Return the payload after a check of its row indices.

        Raises :class:`InvalidUpdate` with the reason ``rows``.
        """
        words = np.frombuffer(payload, "<u4")
        counts = [int(count) for count in words[: len(self.tables)]]
        possible = all(n <= table.rows for n, table in zip(counts, self.tables, strict=True))
        if not possible or payload.nbytes != self._size(counts):
            raise InvalidUpdate("the number of rows does not match the payload", reason="rows")
        for table, sent in zip(self.tables, RowIndex(self, payload).rows_sent, strict=True):
            if (sent[1:] <= sent[:-1]).any() or (sent >= table.rows).any():
                raise InvalidUpdate("a row index is invalid or repeated", reason="rows")
        return payload

    def pieces(self, most: int) -> Iterator[GapPiece | TablePiece]:
        """Yield all elements in pieces of at most ``most`` elements, or of a single row."""
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
    """Positions of the parts of a payload.

    Only for a payload whose row counts fit it, as :meth:`RowsFormat.unpack` checks.
    """

    def __init__(self, payload_format: RowsFormat, payload: memoryview) -> None:
        self._words = np.frombuffer(payload, "<u4")
        tables = payload_format.tables
        counts = [int(count) for count in self._words[: len(tables)]]
        edges = np.cumsum([len(tables), *counts])
        #: For each table, the indices of the rows in the payload, ascending.
        self.rows_sent = [self._words[a:b] for a, b in pairwise(edges)]
        self._dense = int(edges[-1])
        sizes = [count * table.width for count, table in zip(counts, tables, strict=True)]
        self._starts = np.cumsum([self._dense + payload_format.dense, *sizes])

    def gap(self, at: int, length: int) -> NDArray[np.float32]:
        """Return ``length`` elements outside tables, from the one with index ``at``."""
        start = self._dense + at
        return self._words[start : start + length].view("<f4")

    def rows(self, table: int, width: int, first: int, last: int) -> NDArray[np.float32]:
        """Return the table's rows at positions ``[first, last)`` of the payload.

        The result is float32 ``[last − first, width]``.
        """
        start = int(self._starts[table])
        words = self._words[start + first * width : start + last * width]
        return words.view("<f4").reshape(-1, width)


@dataclass(frozen=True)
class GapPiece:
    """Elements ``[start, stop)`` outside tables; ``at`` such elements precede them."""

    format: RowsFormat
    start: int
    stop: int
    at: int

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = scratch[: self.stop - self.start]
        out.numpy()[:] = RowIndex(self.format, payload).gap(self.at, len(out))
        return out


@dataclass(frozen=True)
class TablePiece:
    """Rows ``[first, last)`` of a table. Rows that were not sent decode to 0."""

    format: RowsFormat
    number: int
    first: int
    last: int

    @property
    def table(self) -> Table:
        return self.format.tables[self.number]

    @property
    def start(self) -> int:
        return self.table.start + self.first * self.table.width

    @property
    def stop(self) -> int:
        return self.table.start + self.last * self.table.width

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        index, width = RowIndex(self.format, payload), self.table.width
        sent = index.rows_sent[self.number]
        begin, end = (int(at) for at in np.searchsorted(sent, (self.first, self.last)))
        out = scratch[: self.stop - self.start].zero_()
        targets = sent[begin:end].astype(np.int64) - self.first
        out.view(-1, width).numpy()[targets] = index.rows(self.number, width, begin, end)
        return out


def _arrays(payload_format: RowsFormat, vector: Tensor) -> Iterator[NDArray[np.generic]]:
    """Yield the parts of a payload, in order."""
    tables = [table.of(vector) for table in payload_format.tables]
    changed = [(table != 0).any(1).nonzero().view(-1) for table in tables]
    yield np.array([len(rows) for rows in changed], "<u4")
    yield from (rows.numpy().astype("<u4") for rows in changed)
    numbers = [vector[start:stop] for start, stop in payload_format.gaps]
    numbers += [table[rows] for table, rows in zip(tables, changed, strict=True)]
    yield from (each.numpy().astype("<f4", copy=False) for each in numbers)


def _joined(arrays: Iterable[NDArray[np.generic]]) -> memoryview:
    return np.concatenate([each.reshape(-1).view(np.uint8) for each in arrays]).data.toreadonly()
