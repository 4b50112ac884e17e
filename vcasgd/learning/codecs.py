"""How a vector is encoded for the wire: raw little-endian numbers, never a pickle.

NumPy does the reading because torch refuses read-only memory, and what arrives from a socket
is read-only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcasgd.errors import InvalidUpdate, SpecError


class Codec(Protocol):
    """float32 ``[n]`` to bytes and back."""

    @property
    def name(self) -> str:
        """As in ``update.codec`` of a job."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""

    @property
    def halves(self) -> bool:
        """Whether workers that push in it make do with bfloat16 when they fetch."""

    def encode(self, vector: Tensor) -> memoryview:
        """The contiguous bytes of a vector; may share its memory, so send before you change."""

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        """Decodes into ``out[offset : offset + len(payload) / itemsize]``.

        ``out`` is a contiguous float32 vector on the CPU. Chunks that are cut at multiples of
        ``itemsize`` can be decoded one by one. Raises :class:`InvalidUpdate` with the reason
        ``length``, and nothing written, if the payload is not whole or does not fit.
        """

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        """The numbers of a whole chunk, float32; in ``scratch``, which must be long enough, or,
        where nothing has to be decoded, in the payload's own memory, which must be writable."""

    def largest(self, payload: bytes | memoryview) -> float:
        """The largest magnitude among the encoded numbers; NaN or infinity if one is."""

    def encoded_size(self, elements: int) -> int:
        """Bytes of an encoded vector of so many elements."""


class Float32:
    """As it is: four bytes an element, no loss, no copy on little-endian machines."""

    name = "float32"
    itemsize = 4
    halves = False

    def encode(self, vector: Tensor) -> memoryview:
        """Shares the memory of a contiguous float32 vector on the CPU."""
        return _bytes_of(vector.detach().to("cpu", torch.float32).numpy(), "<f4")

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        target = _target(self, payload, out, offset)
        target[:] = np.frombuffer(payload, "<f4")

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        if sys.byteorder == "little":
            return torch.frombuffer(payload, dtype=torch.float32)
        self.decode(payload, scratch)
        return scratch[: payload.nbytes // self.itemsize]

    def largest(self, payload: bytes | memoryview) -> float:
        numbers = np.frombuffer(payload, "<f4")
        # both let NaN through
        return float(max(np.max(numbers), -np.min(numbers))) if len(numbers) else 0.0

    def encoded_size(self, elements: int) -> int:
        return elements * self.itemsize


class BFloat16:
    """The upper half of a float32, rounded to the nearest, ties to even: two bytes an element.

    The relative error is at most 2⁻⁸ for normal numbers; the range is that of float32.
    """

    name = "bfloat16"
    itemsize = 2
    halves = True

    def encode(self, vector: Tensor) -> memoryview:
        """Always a copy."""
        # NumPy has no bfloat16, so its bits travel as int16
        bits = vector.detach().to("cpu", torch.bfloat16).view(torch.int16)
        return _bytes_of(bits.numpy(), "<i2")

    def decode(self, payload: bytes | memoryview, out: Tensor, offset: int = 0) -> None:
        target = _target(self, payload, out, offset).view(np.uint32)
        np.left_shift(np.frombuffer(payload, "<u2"), 16, out=target, dtype=np.uint32)

    def decoded(self, payload: memoryview, scratch: Tensor) -> Tensor:
        out = scratch[: payload.nbytes // self.itemsize]
        if sys.byteorder == "little":
            # torch converts with vector instructions, NumPy's shift has to widen first
            return out.copy_(torch.frombuffer(payload, dtype=torch.bfloat16))
        self.decode(payload, out)
        return out

    def largest(self, payload: bytes | memoryview) -> float:
        bits = np.frombuffer(payload, "<u2")
        # among numbers of one sign a larger magnitude has larger bits, and NaN the largest;
        # as unsigned numbers the negative ones come last, as signed ones the positive
        negative = int(np.max(bits, initial=0x8000)) & 0x7FFF
        positive = int(np.max(bits.view("<i2"), initial=0))
        return float(np.uint32(max(negative, positive) << 16).view(np.float32))

    def encoded_size(self, elements: int) -> int:
        return elements * self.itemsize


class Encoding:
    """A vector as its codec encodes it: piece by piece while it is sent, so that the whole is
    never copied. The vector (float32 ``[n]``) must not change."""

    def __init__(self, codec: Codec, vector: Tensor) -> None:
        self._codec = codec
        self._vector = vector

    def __len__(self) -> int:
        """Bytes."""
        return self._codec.encoded_size(self._vector.numel())

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Pieces of ``size`` bytes, the last one shorter."""
        step = size // self._codec.itemsize
        for start in range(0, self._vector.numel(), step):
            yield self._codec.encode(self._vector[start : start + step])


_CODECS: dict[str, type[Codec]] = {"float32": Float32, "bfloat16": BFloat16}


def make_codec(name: str) -> Codec:
    """The codec of that name. Raises :class:`SpecError` if there is none."""
    if name not in _CODECS:
        raise SpecError(
            f"update.codec: unknown codec {name!r}",
            remedy=f"choose one of {', '.join(_CODECS)}",
            field="update.codec",
        )
    return _CODECS[name]()


def _bytes_of(array: NDArray[Any], wire_type: str) -> memoryview:
    wire = np.ascontiguousarray(array.astype(wire_type, copy=False))
    return wire.view(np.uint8).data.toreadonly()


def _target(
    codec: Codec, payload: bytes | memoryview, out: Tensor, offset: int
) -> NDArray[np.float32]:
    """The part of ``out`` that the payload fills, sharing its memory."""
    length = memoryview(payload).nbytes
    stop = offset + length // codec.itemsize
    if length % codec.itemsize or offset < 0 or stop > out.numel():
        raise InvalidUpdate(
            f"{length} bytes of {codec.name} at element {offset} do not fit "
            f"into a vector of {out.numel()} elements",
            reason="length",
        )
    target: NDArray[np.float32] = out.detach().numpy()[offset:stop]
    return target
