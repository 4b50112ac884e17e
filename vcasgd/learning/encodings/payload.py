"""Interfaces of codecs and of payloads: how the updates of a shard are laid out in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.errors import InvalidUpdate


class Codec(Protocol):
    """Converts float32 ``[n]`` to bytes and back, block by block."""

    @property
    def name(self) -> str:
        """The name in ``update.codec`` of a job."""

    @property
    def block_floats(self) -> int:
        """Elements of a block, the smallest unit that can be decoded on its own."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; a power of two, so that chunks end at block boundaries."""

    @property
    def for_statistics(self) -> bool:
        """True if running statistics can be encoded: the error is relative to each number."""

    @property
    def bfloat16_fetch(self) -> bool:
        """True if workers that push in this codec also fetch the model as bfloat16."""

    def for_update(self, number: int) -> Self:
        """Return the codec for a worker's update with this number, counted from 0.

        The codecs of all updates decode alike.
        """

    def encode(self, vector: Tensor) -> memoryview:
        """Return the contiguous bytes of a vector.

        They may share its memory, so send them before you change it.
        """

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        """Decode whole blocks into ``out[offset:]``.

        ``out`` is a contiguous float32 vector on the CPU with room for the whole last block. Chunks
        that are cut at multiples of ``block_bytes`` can be decoded one by one. Raises
        :class:`InvalidUpdate` with the reason ``length``, and writes nothing, if the payload is
        incomplete or does not fit.
        """

    def decode_chunk(self, payload: memoryview, scratch: Tensor) -> Tensor:
        """Return the numbers of whole blocks as float32.

        They are in ``scratch``, which must be long enough. If no conversion is needed, they share
        the memory of the payload, which must be writable.
        """

    def max_magnitude(self, payload: bytes | memoryview) -> float:
        """Return the largest magnitude among the encoded numbers, or a tight upper bound.

        Returns NaN or infinity if any number is not finite.
        """

    def encoded_size(self, elements: int) -> int:
        """Return the bytes of an encoded vector of ``elements`` numbers, in whole blocks."""


def target_of(
    codec: Codec, payload: bytes | memoryview, out: Tensor, offset: int
) -> NDArray[np.float32]:
    """Return the part of ``out`` that the payload fills, sharing its memory.

    Raises :class:`InvalidUpdate` with the reason ``length`` if it does not fit.
    """
    length = memoryview(payload).nbytes
    stop = offset + length // codec.block_bytes * codec.block_floats
    if length % codec.block_bytes or offset < 0 or stop > out.numel():
        raise InvalidUpdate(
            f"{length} bytes of {codec.name} at element {offset} do not fit "
            f"into a vector of {out.numel()} elements",
            reason="length",
        )
    target: NDArray[np.float32] = out.detach().numpy()[offset:stop]
    return target


class Piece(Protocol):
    """Elements ``[start, stop)`` of a vector, which can be decoded on their own."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def decode(self, payload: memoryview, scratch: Tensor) -> Tensor:
        """Return float32 ``[stop − start]`` from the unpacked payload of the whole vector.

        The memory is that of :meth:`Codec.decode_chunk`.
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

        ``size`` is a power of two and at least a block.
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
