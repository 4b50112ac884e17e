"""Interface of a codec."""

from __future__ import annotations

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
