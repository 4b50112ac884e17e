"""Measurement of the encodings of updates: size, speed and error, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vcasgd.learning.encodings import CODECS
from vcasgd.learning.encodings.blocks import BlockFormat, ErrorFeedback
from vcasgd.learning.encodings.encoder import as_sent
from vcasgd.learning.encodings.packed import PackedFormat
from vcasgd.learning.encodings.payload import EncodedVector, PayloadFormat
from vcasgd.learning.encodings.rows import RowsFormat, Table
from vcasgd.store.tensors.chunks import CHUNK_BYTES

#: Numbers decoded at a time; the parameter server uses the same.
PIECE_FLOATS = 1 << 18
#: Row length of the table that ``rows`` is measured with.
ROW_FLOATS = 64
#: One in this many rows of the table has changed.
ROWS_APART = 50


@dataclass(frozen=True)
class CodecFigures:
    """Results for one encoding.

    Speeds are in GB of float32 per second of processor time, which makes them comparable between
    codecs and independent of other load. The error is the root mean square error relative to the
    root mean square of the numbers.
    """

    codec: str
    bytes_per_update: int
    share_of_float32: float
    encode_gb_s: float
    decode_gb_s: float
    relative_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_codecs(size_mb: int, seconds: float) -> list[CodecFigures]:
    """Measure each codec on normally distributed differences of ``size_mb`` MiB as float32.

    Encoding and decoding are each repeated for ``seconds`` of processor time, in one thread.
    ``rows`` is measured on a table with rows of 64 numbers, of which one in 50 is not 0.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(size_mb, seconds)
    finally:
        torch.set_num_threads(threads)


def _measured(size_mb: int, seconds: float) -> list[CodecFigures]:
    floats = size_mb * (1 << 20) // 4
    vector = torch.randn(floats, generator=torch.Generator().manual_seed(0))
    return [*(_blockwise(name, vector, seconds) for name in CODECS), _rows(vector, seconds)]


def _blockwise(name: str, vector: Tensor, seconds: float) -> CodecFigures:
    blocks = BlockFormat(CODECS[name](), len(vector), len(vector))
    feedback, wire = ErrorFeedback(blocks), as_sent(blocks)

    def encode(update: Tensor) -> EncodedVector:
        encoded = feedback.encode(update)
        return wire.pack(encoded) if isinstance(wire, PackedFormat) else encoded

    # The encoding of the first update, before there is a residual.
    return _measure(wire, wire.encode(vector), encode, vector, seconds)


def _rows(vector: Tensor, seconds: float) -> CodecFigures:
    rows = len(vector) // ROW_FLOATS
    wire = RowsFormat(len(vector), (Table(0, rows, ROW_FLOATS),))
    vector = vector.clone()
    vector.view(rows, ROW_FLOATS)[torch.arange(rows) % ROWS_APART != 0] = 0
    return _measure(wire, wire.encode(vector), wire.encode, vector, seconds)


def _measure(
    wire: PayloadFormat,
    encoded: EncodedVector,
    encoding: Callable[[Tensor], EncodedVector],
    vector: Tensor,
    seconds: float,
) -> CodecFigures:
    payload = memoryview(bytearray(len(encoded)))
    _fill(payload, encoded.chunks(CHUNK_BYTES))
    scratch = wire.scratch(PIECE_FLOATS)

    def encode() -> None:
        for _ in encoding(vector).chunks(CHUNK_BYTES):
            pass

    def decode() -> None:
        unpacked = wire.unpack(payload)
        for piece in wire.pieces(PIECE_FLOATS):
            piece.decode(unpacked, scratch)

    return CodecFigures(
        codec=wire.name,
        bytes_per_update=len(payload),
        share_of_float32=len(payload) / vector.nbytes,
        encode_gb_s=_speed(encode, vector, seconds),
        decode_gb_s=_speed(decode, vector, seconds),
        relative_error=_error(wire, payload, vector),
    )


def _fill(payload: memoryview, chunks: Iterable[memoryview]) -> None:
    at = 0
    for chunk in chunks:
        payload[at : at + chunk.nbytes] = chunk
        at += chunk.nbytes


def _error(wire: PayloadFormat, payload: memoryview, vector: Tensor) -> float:
    scratch, wrong = wire.scratch(PIECE_FLOATS), 0.0
    unpacked = wire.unpack(payload)
    for piece in wire.pieces(PIECE_FLOATS):
        off = piece.decode(unpacked, scratch) - vector[piece.start : piece.stop]
        wrong += float(off.double().square().sum())
    return float((wrong / float(vector.double().square().sum())) ** 0.5)


def _speed(work: Callable[[], None], vector: Tensor, seconds: float) -> float:
    work()  # Touches all pages and fills the caches.
    rounds, started = 0, time.process_time()
    while (elapsed := time.process_time() - started) < seconds:
        work()
        rounds += 1
    return rounds * vector.nbytes / elapsed / 1e9
