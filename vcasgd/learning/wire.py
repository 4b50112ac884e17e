"""How the updates of a job look on the wire, and a worker's updates one after the other.

It all follows from the job and the model, so no header has to be believed.
"""

from __future__ import annotations

from torch import Tensor

from vcasgd.learning.codecs import Codec, Float32, Partition, make_codec
from vcasgd.learning.encoding import Encoded, Feedback, Format, PayloadFormat
from vcasgd.learning.rows import NAME as ROWS
from vcasgd.learning.rows import Rows, RowsEncoding, tables_of
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Layout
from vcasgd.spec.update import Update


def codec_of(update: Update) -> Codec:
    """What a job's numbers are encoded with; float32 where only some of the rows are sent."""
    if update.codec == ROWS:
        return Float32()
    if update.codec == Partition.name:
        return Partition(getattr(update, "partitions", 4))
    return make_codec(update.codec)


def wires_of(update: Update, layout: Layout, part: ShardRange) -> dict[str, PayloadFormat]:
    """What a shard's updates may look like, by the codec that their header names: what the job
    says, and, where that keeps something back, all of it as float32."""
    if update.codec == ROWS:
        rows = Rows(part.sent, tables_of(layout, part))
        return {rows.name: rows}
    usual = Format(codec_of(update), part.sent, part.parameters)
    if usual.codec.for_statistics:
        return {usual.name: usual}
    whole = Format(Float32(), part.sent, part.parameters)
    return {usual.name: usual, whole.name: whole}


class Encoder:
    """Encodes one worker's updates of one shard. Each is to be encoded once, since what its
    encoding keeps back is part of the next one."""

    def __init__(self, update: Update, layout: Layout, part: ShardRange) -> None:
        self._part = part
        self._rows = Rows(part.sent, tables_of(layout, part)) if update.codec == ROWS else None
        self._feedback = Feedback(Format(codec_of(update), part.sent, part.parameters))

    @property
    def owes(self) -> bool:
        """Whether something was kept back."""
        return self._feedback.owes

    def encode(self, vector: Tensor, *, last: bool) -> Encoded:
        """The shard's part of an update, float32 [floats of the job]. With the ``last`` one goes
        all that was kept back."""
        sent = self._part.sent_of(vector)
        if self._rows is not None:
            return RowsEncoding(self._rows, sent)
        return self._feedback.whole(sent) if last else self._feedback.encoding(sent)
