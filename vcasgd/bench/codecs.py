"""What the encodings of updates cost in bytes, time and precision, in this process alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vcasgd.learning.codecs import CODECS, make_codec
from vcasgd.learning.encoding import Encoding, Feedback, Format
from vcasgd.store.planes import CHUNK_BYTES

#: numbers that are decoded at a time, as the parameter server does it
PIECE_FLOATS = 1 << 18


@dataclass(frozen=True)
class CodecFigures:
    """Speeds are in GB of float32 a second, so that those of all codecs can be compared; the error
    is the root mean square, relative to that of the numbers."""

    codec: str
    bytes_per_update: int
    share_of_float32: float
    encode_gb_s: float
    decode_gb_s: float
    relative_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_codecs(size_mb: int, seconds: float) -> list[CodecFigures]:
    """Each codec on normally distributed differences of ``size_mb`` MiB as float32; encoding and
    decoding are repeated for ``seconds`` each."""
    floats = size_mb * (1 << 20) // 4
    vector = torch.randn(floats, generator=torch.Generator().manual_seed(0))
    return [_measure(name, vector, seconds) for name in CODECS]


def _measure(name: str, vector: Tensor, seconds: float) -> CodecFigures:
    wire = Format(make_codec(name), len(vector), len(vector))
    feedback = Feedback(wire)
    payload = memoryview(bytearray(wire.size))
    scratch = wire.scratch(PIECE_FLOATS)

    def encode() -> None:
        for _ in _encoded(wire, feedback.corrected(vector)):
            pass

    def decode() -> None:
        for piece in wire.pieces(PIECE_FLOATS):
            piece.decoded(payload, scratch)

    _fill(payload, _encoded(wire, vector))
    error = _error(wire, payload, vector)
    return CodecFigures(
        codec=name,
        bytes_per_update=wire.size,
        share_of_float32=wire.size / (4 * len(vector)),
        encode_gb_s=_speed(encode, vector, seconds),
        decode_gb_s=_speed(decode, vector, seconds),
        relative_error=error,
    )


def _encoded(wire: Format, vector: Tensor) -> Iterable[memoryview]:
    return Encoding(wire, vector).chunks(CHUNK_BYTES)


def _fill(payload: memoryview, chunks: Iterable[memoryview]) -> None:
    at = 0
    for chunk in chunks:
        payload[at : at + chunk.nbytes] = chunk
        at += chunk.nbytes


def _error(wire: Format, payload: memoryview, vector: Tensor) -> float:
    scratch, wrong = wire.scratch(PIECE_FLOATS), 0.0
    for piece in wire.pieces(PIECE_FLOATS):
        off = piece.decoded(payload, scratch) - vector[piece.start : piece.stop]
        wrong += float(off.double().square().sum())
    return float((wrong / float(vector.double().square().sum())) ** 0.5)


def _speed(work: Callable[[], None], vector: Tensor, seconds: float) -> float:
    work()  # pages are touched, caches filled
    rounds, begun = 0, time.perf_counter()
    while (taken := time.perf_counter() - begun) < seconds:
        work()
        rounds += 1
    return rounds * vector.nbytes / taken / 1e9
