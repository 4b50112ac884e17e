"""Payload formats of a job, and the encoder of one worker's updates.

Formats follow from the job and the model, so no header has to be trusted.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

from vcasgd.learning.encodings import CODECS, Codec, Float32, Int8, Partition, TopK
from vcasgd.learning.encodings.blocks import BlockFormat, ErrorFeedback
from vcasgd.learning.encodings.low_bits import Int2
from vcasgd.learning.encodings.packed import PackedFormat
from vcasgd.learning.encodings.payload import EncodedVector, PayloadFormat
from vcasgd.learning.encodings.rows import NAME as ROWS
from vcasgd.learning.encodings.rows import RowsFormat, tables_of
from vcasgd.learning.encodings.steps import StepFormat
from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Floats, within
from vcasgd.spec.update import Update

#: Rates of a link, in bytes per second, below which each encoding costs less time than it saves. A
#: thread encodes some 700 MB/s as int8, and some 250 MB/s as int2.
MAX_RATES: tuple[tuple[float, Literal["int2", "int8"]], ...] = ((50e6, "int2"), (125e6, "int8"))


def codec_for(rate: float) -> Literal["float32", "int2", "int8"]:
    """Return the encoding for a link to the store of so many bytes per second."""
    return next((codec for limit, codec in MAX_RATES if rate < limit), "float32")


def codec_of(update: Update) -> Codec:
    """Return the codec of a job's numbers; float32 under ``codec: rows``, and of ``auto``."""
    if update.codec in (ROWS, "auto"):
        return Float32()
    if update.codec == Partition.name:
        return Partition(getattr(update, "partitions", 4))
    return CODECS[update.codec]()


def payload_formats(update: Update, layout: Layout, part: ShardRange) -> dict[str, PayloadFormat]:
    """Return the allowed formats of a shard's updates, by the codec named in their header.

    The first is the usual one. A codec with a residual also allows float32, for a worker's last
    update.
    """
    if update.codec == ROWS:
        rows = RowsFormat(part.floats, tables_of(layout, part))
        return {rows.name: rows}
    usual = BlockFormat(codec_of(update), part.floats, part.parameters)
    if usual.codec.for_statistics:
        return {usual.name: usual}
    whole = BlockFormat(Float32(), part.floats, part.parameters)
    return {usual.name: as_sent(usual), whole.name: whole}


def as_sent(blocks: BlockFormat) -> PayloadFormat:
    """Return the format of payloads in blocks: that of packed ones if packing makes them fewer."""
    return PackedFormat(blocks) if isinstance(blocks.codec, Int2) else blocks


def step_format(update: Update, layout: Layout, part: ShardRange) -> StepFormat | None:
    """Return the format of the steps of a shard's published model; None if workers fetch it whole.

    Sparse codecs would leave the published model far behind the exact one, so their jobs use int8.
    """
    usual = next(iter(payload_formats(update, layout, part).values()))
    if isinstance(usual, BlockFormat):
        if usual.codec.for_statistics:
            return None
        if isinstance(usual.codec, TopK | Partition):
            usual = replace(usual, codec=Int8())
    return StepFormat(usual, part.parameters)


class Encoder:
    """Encodes one worker's updates of one shard. Thread-safe.

    Encode each update once: the residual of its encoding becomes part of the next one.
    """

    def __init__(
        self, update: Update, layout: Layout, part: ShardRange, *, mapped: bool = False
    ) -> None:
        """If ``mapped``, this process has only those parts of the residual that it uses."""
        self._part, self._mapped = part, mapped
        tables = tables_of(layout, part)
        self._rows = RowsFormat(part.floats, tables) if update.codec == ROWS else None
        blocks = BlockFormat(codec_of(update), part.floats, part.parameters)
        self._blocks, self._wire = blocks, as_sent(blocks)
        self._lock = threading.Lock()
        self.follow_rollback(0)

    def follow_rollback(self, rollbacks: int) -> None:
        """Forget the residual, because the model went back; ``rollbacks`` are those so far."""
        with self._lock:
            self._rollbacks = rollbacks
            self._feedback = ErrorFeedback(self._blocks, mapped=self._mapped)

    @property
    def is_exact(self) -> bool:
        """True if it never keeps a residual."""
        return self._rows is not None or self._blocks.codec.for_statistics

    @property
    def has_residual(self) -> bool:
        """True if part of an earlier update was not sent yet."""
        return self._feedback.has_residual

    def encode(self, vector: Floats, *, last: bool) -> EncodedVector:
        """Encode the shard's part of an update, float32 ``[floats of the job]``.

        The ``last`` update also carries the whole residual.
        """
        own = within(vector, self._part.start, self._part.stop)
        return self.encode_part(own, self._rollbacks, last=last)

    def encode_part(self, own: Floats, rollbacks: int, *, last: bool) -> EncodedVector:
        """Do what :meth:`encode` does with the shard's part alone, float32 ``[floats]``, of a model
        after ``rollbacks``."""
        with self._lock:
            encoded = self._encoded(own, last=last)
            if rollbacks != self._rollbacks:
                # What it has kept back is of a model that diverged.
                self._feedback = ErrorFeedback(self._blocks, mapped=self._mapped)
        return encoded

    def _encoded(self, own: Floats, *, last: bool) -> EncodedVector:
        if self._rows is not None:
            return self._rows.encode(own[:])
        if last:
            return self._feedback.whole(own)
        encoded = self._feedback.encode(own)
        return self._wire.pack(encoded) if isinstance(self._wire, PackedFormat) else encoded
