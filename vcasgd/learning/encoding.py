"""An update as it is on the wire: its parameters in the job's codec, then its statistics.

A codec whose error is relative to a whole block can't be used for running statistics: a variance
that became 0 would blow up whatever is normalised with it. They are sent as float32 then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from vcasgd.learning.codecs import Codec, Float32


class Piece(Protocol):
    """Elements ``[start, stop)`` of a vector."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        """float32 [stop − start] from the payload of the whole vector. As :meth:`Codec.decoded`."""


class Encoded(Protocol):
    """A vector as it is sent; the vector (float32 ``[n]``) must not change."""

    @property
    def codec(self) -> str:
        """Its name, as in a header."""

    def __len__(self) -> int:
        """Bytes."""

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Pieces of ``size`` bytes, a power of two not below a block; the last one shorter."""


class PayloadFormat(Protocol):
    """How the vectors of one shard look on the wire."""

    @property
    def name(self) -> str:
        """As in the header of an update."""

    @property
    def size(self) -> int:
        """Bytes of a payload, at most."""

    def fits(self, size: int) -> bool:
        """Whether a payload may have so many bytes."""

    def largest(self, chunk: memoryview, at: int) -> float:
        """As :meth:`Codec.largest`, of the bytes of the payload from ``at`` on, whole blocks."""

    def check(self, payload: memoryview) -> None:
        """What can only be seen of the whole. Raises :class:`InvalidUpdate`; what passes is
        decoded without an error."""

    def pieces(self, most: int) -> Iterator[Piece]:
        """All elements in pieces of whole blocks, of at most ``most`` elements."""

    def scratch(self, most: int) -> Tensor:
        """Room for any of the pieces, decoded."""


@dataclass(frozen=True)
class Section:
    """Elements ``[start, stop)`` of a vector, in ``size`` bytes from ``at`` on."""

    codec: Codec
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        return self.codec.encoded_size(self.stop - self.start)

    def bytes_of(self, vector: Tensor, at: int, end: int) -> memoryview:
        """The encoded bytes ``[at, end)``, which are whole blocks; both count from 0."""
        codec, first = self.codec, self.start
        start = first + (at - self.at) // codec.block_bytes * codec.block_floats
        stop = first + (end - self.at) // codec.block_bytes * codec.block_floats
        return codec.encode(vector[start : min(stop, self.stop)])


@dataclass(frozen=True)
class BlockSections:
    """Elements ``[start, stop)``, encoded in the bytes ``[at, end)``."""

    codec: Codec
    start: int
    stop: int
    at: int
    end: int

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        numbers = self.codec.decoded(payload[self.at : self.end], scratch)
        return numbers[: self.stop - self.start]


@dataclass(frozen=True)
class Format:
    """How ``floats`` elements are encoded, of which the first ``parameters`` are parameters.
    It follows from the job alone, so no header has to be believed."""

    codec: Codec
    floats: int
    parameters: int

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """In order; together they are the payload."""
        if self.codec.for_statistics:
            return (Section(self.codec, 0, self.floats, 0),)
        first = Section(self.codec, 0, self.parameters, 0)
        return first, Section(Float32(), self.parameters, self.floats, first.size)

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def size(self) -> int:
        """Bytes of each payload."""
        return sum(section.size for section in self.sections)

    def fits(self, size: int) -> bool:
        return size == self.size

    def check(self, payload: memoryview) -> None:
        """Any payload of its size that was inspected can be decoded."""

    def pieces(self, most: int) -> Iterator[BlockSections]:
        """All elements in pieces of whole blocks, of at most ``most`` elements."""
        for section in self.sections:
            codec = section.codec
            step = max(most // codec.block_floats, 1) * codec.block_floats
            for start in range(section.start, section.stop, step):
                stop = min(start + step, section.stop)
                at = section.at + codec.encoded_size(start - section.start)
                yield BlockSections(codec, start, stop, at, at + codec.encoded_size(stop - start))

    def scratch(self, most: int) -> Tensor:
        """Room for any of the pieces, decoded."""
        return torch.empty(min(most, self.floats) + self.codec.block_floats)

    def largest(self, chunk: memoryview, at: int) -> float:
        """As :meth:`Codec.largest`, of the bytes of the payload from ``at`` on, whole blocks."""
        found = [0.0]
        for section in self.sections:
            start, stop = (
                min(max(edge, section.at), section.at + section.size) - at
                for edge in (at, at + chunk.nbytes)
            )
            if start < stop:
                found.append(section.codec.largest(chunk[start:stop]))
        # max() of Python may pass over NaN, a sum does not
        return max(found) if sum(found) < float("inf") else sum(found)


class Encoding:
    """A vector as it is encoded: piece by piece while it is sent, so that the whole is never
    copied. The vector (float32 ``[n]``) must not change."""

    def __init__(self, wire: Format, vector: Tensor) -> None:
        self._format = wire
        self._vector = vector

    @property
    def codec(self) -> str:
        return self._format.name

    def __len__(self) -> int:
        """Bytes."""
        return self._format.size

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Pieces of ``size`` bytes, a power of two not below a block; the last one shorter."""
        for at in range(0, len(self), size):
            parts = [
                section.bytes_of(
                    self._vector,
                    max(at, section.at),
                    min(at + size, section.at + section.size),
                )
                for section in self._format.sections
                if section.at < at + size and at < section.at + section.size
            ]
            yield parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


class Feedback:
    """Error feedback (Seide 2014; Karimireddy 2019, arXiv 1901.09847): what an encoding lost of a
    difference is added to the next one, so that what was sent and what is kept are together what
    was produced. It is kept by the worker, and lost with it, unless its last update is sent
    whole."""

    def __init__(self, wire: Format) -> None:
        self._format = wire
        self._kept: Tensor | None = None
        self._turn = 0

    @property
    def kept(self) -> Tensor:
        """What was not sent yet, float32 [parameters]; the statistics have no such rest."""
        if self._kept is None:
            self._kept = torch.zeros(self._format.parameters)
        return self._kept

    @property
    def owes(self) -> bool:
        """Whether something was kept back."""
        return self._kept is not None

    def whole(self, produced: Tensor) -> Encoding:
        """An update, float32 [floats], with all that was kept back; float32 where the encoding
        keeps something back."""
        if self._format.codec.for_statistics:
            return Encoding(self._format, produced)
        vector = produced
        if self._kept is not None:
            vector = produced.clone()
            vector[: self._format.parameters].add_(self._kept)
            self._kept = None
        return Encoding(replace(self._format, codec=Float32()), vector)

    def encoding(self, produced: Tensor, most: int = 1 << 18) -> Encoding:
        """An update, float32 [floats], with what was kept back, as far as the encoding gets it."""
        if self._format.codec.for_statistics:
            return Encoding(self._format, produced)
        wire = replace(self._format, codec=self._format.codec.at(self._turn))
        self._turn += 1
        vector = produced.clone()
        vector[: wire.parameters].add_(self.kept)
        self._keep(wire, vector, most)
        return Encoding(wire, vector)

    def _keep(self, wire: Format, vector: Tensor, most: int) -> None:
        """What will not be sent of a vector."""
        kept, scratch = self.kept, wire.scratch(most)
        for piece in wire.pieces(most):
            if piece.stop <= wire.parameters:
                numbers = vector[piece.start : piece.stop]
                sent = piece.codec.decoded(piece.codec.encode(numbers), scratch)
                torch.sub(numbers, sent[: len(numbers)], out=kept[piece.start : piece.stop])
