"""Interfaces of codecs and of payloads: how the updates of a shard are laid out in bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol, Self

from torch import Tensor


class Codec(ABC):
    """Converts float32 ``[n]`` to bytes and back, block by block."""

    #: The name in ``update.codec`` of a job.
    name: str
    #: Elements of a block, the smallest unit that can be decoded on its own.
    block_floats: int
    #: Bytes of a block; a power of two, so that chunks end at block boundaries.
    block_bytes: int
    #: True if running statistics can be encoded: the error is relative to each number.
    for_statistics = False

    def for_update(self, number: int) -> Self:  # noqa: ARG002 - most codecs encode all alike
        """Return the codec for a worker's update with this number, counted from 0.

        The codecs of all updates decode alike.
        """
        return self

    @abstractmethod
    def encode(self, vector: Tensor) -> memoryview:
        """Return the contiguous bytes of a vector.

        They may share its memory, so send them before you change it.
        """

    @abstractmethod
    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        """Return the numbers of whole blocks as float32.

        They are in ``scratch``, a contiguous float32 vector on the CPU, which must be long enough.
        If no conversion is needed, they share the memory of the payload, which must be writable.
        The length of a payload must have been checked (:meth:`PayloadFormat.fits`).
        """

    @abstractmethod
    def max_magnitude(self, payload: bytes | memoryview) -> float:
        """Return the largest magnitude among the encoded numbers, or a tight upper bound.

        Returns NaN or infinity if any number is not finite.
        """

    def encoded_size(self, elements: int) -> int:
        """Return the bytes of an encoded vector of ``elements`` numbers, in whole blocks."""
        return -(-elements // self.block_floats) * self.block_bytes

    def _target(self, payload: memoryview, scratch: Tensor) -> Tensor:
        """Return the part of ``scratch`` that the numbers of a payload fill."""
        return scratch[: payload.nbytes // self.block_bytes * self.block_floats]


class Piece(Protocol):
    """Elements ``[start, stop)`` of a vector, which can be decoded on their own."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        """Return float32 ``[stop − start]`` from the unpacked payload of the whole vector.

        The memory is that of :meth:`Codec.decode`.
        """


class EncodedVector(Protocol):
    """A vector in its encoded form. The source, float32 ``[n]``, must not change."""

    @property
    def codec(self) -> str:
        """The codec's name, for the header of the update."""

    def __len__(self) -> int:
        """Return the number of bytes."""

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield chunks of ``size`` bytes; the last one may be shorter.

        ``size`` is a multiple of 4 KiB, and so of every block.
        """


class EncodedBytes:
    """A payload in memory. The source may change."""

    def __init__(self, codec: str, payload: memoryview) -> None:
        self.codec = codec
        self._payload = payload

    def __len__(self) -> int:
        return self._payload.nbytes

    def chunks(self, size: int) -> Iterator[memoryview]:
        for at in range(0, len(self), size):
            yield self._payload[at : at + size]


class PayloadFormat(Protocol):
    """Layout of the payloads of one shard's updates."""

    @property
    def name(self) -> str:
        """The codec's name, as in the header of an update."""

    @property
    def size(self) -> int:
        """Bytes of the largest payload."""

    def encode(self, vector: Tensor) -> EncodedVector:
        """Encode a vector, float32 ``[n]``, which must not change while it is sent."""

    def fits(self, size: int) -> bool:
        """Return True if a payload can have ``size`` bytes."""

    def max_magnitude(self, chunk: memoryview, at: int) -> float:
        """Return :meth:`Codec.max_magnitude` of whole blocks that start at byte ``at``."""

    def unpack(self, payload: memoryview) -> memoryview:
        """Return the bytes that the pieces decode; the payload itself if it isn't packed.

        Checks what only the whole payload shows. Raises :class:`InvalidUpdate`. A payload that
        passes can be decoded without an error.
        """

    def pieces(self, most: int) -> Iterator[Piece]:
        """Yield all elements in pieces of whole blocks, at most ``most`` elements each."""

    def scratch(self, most: int) -> Tensor:
        """Return a buffer with room for any piece of :meth:`pieces`."""
