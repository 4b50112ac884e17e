"""Payloads in blocks: parameters in the job's codec, then statistics.

A codec whose error is relative to a whole block is unsuitable for running statistics: a variance
rounded to 0 would blow up everything that is normalized with it. With such a codec, statistics
are sent as float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from vcasgd.learning.encodings import Codec, Float32
from vcasgd.learning.encodings.payload import EncodedBytes, EncodedVector
from vcasgd.learning.vector import Floats, MappedVector, pieces_of


@dataclass(frozen=True)
class Section:
    """Elements ``[start, stop)`` of a vector, encoded in ``size`` bytes from byte ``at``."""

    codec: Codec
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        return self.codec.encoded_size(self.stop - self.start)

    def bytes_of(self, vector: Floats, at: int, end: int) -> memoryview:
        """Return the payload's bytes ``[at, end)``, which must be whole blocks of the section."""
        codec, first = self.codec, self.start
        start = first + (at - self.at) // codec.block_bytes * codec.block_floats
        stop = first + (end - self.at) // codec.block_bytes * codec.block_floats
        return codec.encode(vector[start : min(stop, self.stop)])


@dataclass(frozen=True)
class BlockPiece:
    """Elements ``[start, stop)``, encoded in the bytes ``[at, end)``."""

    codec: Codec
    start: int
    stop: int
    at: int
    end: int

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        numbers = self.codec.decode(payload[self.at : self.end], scratch)
        return numbers[: self.stop - self.start]


@dataclass(frozen=True)
class BlockFormat:
    """Format of a vector of ``floats`` elements, of which the first ``parameters`` are parameters.

    It follows from the job alone, so no header has to be trusted.
    """

    codec: Codec
    floats: int
    parameters: int

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections of a payload, in order."""
        if self.codec.for_statistics:
            return (Section(self.codec, 0, self.floats, 0),)
        first = Section(self.codec, 0, self.parameters, 0)
        return first, Section(Float32(), self.parameters, self.floats, first.size)

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def size(self) -> int:
        """Bytes of every payload."""
        return sum(section.size for section in self.sections)

    def encode(self, vector: Floats) -> EncodedBlocks:
        return EncodedBlocks(self, vector)

    def fits(self, size: int) -> bool:
        return size == self.size

    def unpack(self, payload: memoryview) -> memoryview:
        """Return the payload: every one of the right size and magnitude can be decoded."""
        return payload

    def pieces(self, most: int) -> Iterator[BlockPiece]:
        for section in self.sections:
            codec = section.codec
            step = max(most // codec.block_floats, 1) * codec.block_floats
            for start in range(section.start, section.stop, step):
                stop = min(start + step, section.stop)
                at = section.at + codec.encoded_size(start - section.start)
                yield BlockPiece(codec, start, stop, at, at + codec.encoded_size(stop - start))

    def scratch(self, most: int) -> Tensor:
        return torch.empty(min(most, self.floats) + self.codec.block_floats)

    def max_magnitude(self, chunk: memoryview, at: int) -> float:
        magnitudes = [0.0]
        for section in self.sections:
            start, stop = (
                min(max(edge, section.at), section.at + section.size) - at
                for edge in (at, at + chunk.nbytes)
            )
            if start < stop:
                magnitudes.append(section.codec.max_magnitude(chunk[start:stop]))
        # Python's max() can skip NaN; a sum can't
        total = sum(magnitudes)
        return max(magnitudes) if total < float("inf") else total


class EncodedBlocks:
    """A vector, float32 ``[n]``, that is encoded chunk by chunk while it is sent.

    The encoded whole never exists in memory. The vector must not change.
    """

    def __init__(self, payload_format: BlockFormat, vector: Floats) -> None:
        self._format = payload_format
        self._vector = vector

    @property
    def codec(self) -> str:
        return self._format.name

    def __len__(self) -> int:
        return self._format.size

    def chunks(self, size: int) -> Iterator[memoryview]:
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


class ErrorFeedback:
    """Error feedback: adds what an encoding lost of one update to the next update.

    The sum of all sent updates and the residual equals the sum of all updates (Seide 2014;
    Karimireddy 2019, arXiv 1901.09847). The residual exists only in the worker, so it is lost with
    the worker unless the last update is sent :meth:`whole`.
    """

    def __init__(self, payload_format: BlockFormat, *, mapped: bool = False) -> None:
        self._format, self._mapped = payload_format, mapped
        self._residual: Floats | None = None
        self._updates = 0

    @property
    def residual(self) -> Floats:
        """Differences that were not sent yet, float32 ``[parameters]``. Statistics have none."""
        if self._residual is None:
            new = MappedVector if self._mapped else torch.zeros
            self._residual = new(self._format.parameters)
        return self._residual

    @property
    def has_residual(self) -> bool:
        """True if part of an earlier update was not sent yet."""
        return self._residual is not None

    def whole(self, update: Floats) -> EncodedBlocks:
        """Encode an update, float32 ``[floats]``, and the residual without loss.

        A codec that loses something is replaced by float32.
        """
        if self._format.codec.for_statistics:
            return EncodedBlocks(self._format, update)
        vector = update
        if self._residual is not None:
            vector = update.clone()
            for start, piece in pieces_of(self._residual):
                vector[start : start + len(piece)].add_(piece)
            self._residual = None
        return EncodedBlocks(replace(self._format, codec=Float32()), vector)

    def encode(self, update: Floats, most: int = 1 << 18) -> EncodedVector:
        """Encode an update, float32 ``[floats]``, plus the residual, and keep the new residual.

        ``most``: elements that are encoded, and decoded to find the loss, at a time.
        """
        if self._format.codec.for_statistics:
            return EncodedBlocks(self._format, update)
        payload_format = replace(self._format, codec=self._format.codec.for_update(self._updates))
        self._updates += 1
        payload = memoryview(bytearray(payload_format.size))
        scratch = payload_format.scratch(most)
        for piece in payload_format.pieces(most):
            payload[piece.at : piece.end] = self._encode_piece(piece, update, scratch)
        return EncodedBytes(payload_format.name, payload.toreadonly())

    def _encode_piece(self, piece: BlockPiece, update: Floats, scratch: Tensor) -> memoryview:
        numbers = update[piece.start : piece.stop]
        if piece.start >= self._format.parameters:
            return piece.codec.encode(numbers)
        residual = self.residual[piece.start : piece.stop]
        numbers = numbers + residual
        encoded = piece.codec.encode(numbers)
        sent = piece.codec.decode(encoded, scratch)
        torch.sub(numbers, sent[: len(numbers)], out=residual)
        return encoded
