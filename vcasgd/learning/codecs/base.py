"""What a codec is."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.errors import InvalidUpdate


class Codec(Protocol):
    """float32 ``[n]`` to bytes and back."""

    @property
    def name(self) -> str:
        """As in ``update.codec`` of a job."""

    @property
    def block_floats(self) -> int:
        """Elements of a block, the least that can be decoded by itself."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; a power of two, so that blocks end where chunks do."""

    @property
    def for_statistics(self) -> bool:
        """Whether running statistics can be encoded with it: with an error that is relative to
        each single number."""

    @property
    def halves(self) -> bool:
        """Whether workers that push in it make do with bfloat16 when they fetch."""

    def at(self, turn: int) -> Self:
        """The codec as it encodes a worker's update number ``turn`` = 0, 1, 2, …; all of them
        decode alike."""

    def encode(self, vector: Tensor) -> memoryview:
        """The contiguous bytes of a vector; may share its memory, so send before you change."""

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        """Decodes whole blocks into ``out[offset:]``.

        ``out`` is a contiguous float32 vector on the CPU, with room for the last block too.
        Chunks that are cut at multiples of ``block_bytes`` can be decoded one by one. Raises
        :class:`InvalidUpdate` with the reason ``length``, and nothing written, if the payload is
        not whole or does not fit.
        """

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        """The numbers of a whole chunk, float32; in ``scratch``, which must be long enough, or,
        where nothing has to be decoded, in the payload's own memory, which must be writable."""

    def largest(self, payload: bytes | memoryview) -> float:
        """The largest magnitude among the encoded numbers, or a bound just above it; NaN or
        infinity if one of them is."""

    def encoded_size(self, elements: int) -> int:
        """Bytes of an encoded vector of so many elements: whole blocks."""


def target_of(
    codec: Codec, payload: bytes | memoryview, out: Tensor, offset: int
) -> NDArray[np.float32]:
    """The part of ``out`` that the payload fills, sharing its memory."""
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
