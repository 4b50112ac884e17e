"""Payload encodings of updates: raw and little-endian, never a pickle.

Blocks are decoded with NumPy, because torch refuses read-only memory, such as an encoded block.

``payload``  the base class of codecs, and the interface of a payload format
``dense``    codecs that send every number: ``float32``, ``bfloat16``, ``int8``
``low_bits`` the codec of a few levels per number: ``int2``
``sparse``   codecs that send some numbers of each block: ``topk``, ``partition``
``blocks``   payloads of parameters in the job's codec and statistics, with error feedback
``rows``     payloads of changed rows of tables: ``codec: rows``
``encoder``  the formats of a job, and the encoder of one worker
``steps``    steps of the published model, which workers fetch instead of the whole model
"""

from __future__ import annotations

from vcasgd.learning.encodings.dense import BFloat16, Float32, Int8
from vcasgd.learning.encodings.low_bits import Int2
from vcasgd.learning.encodings.payload import Codec
from vcasgd.learning.encodings.sparse import Partition, TopK

__all__ = ["CODECS", "BFloat16", "Codec", "Float32", "Int8", "Partition", "TopK"]

#: Codecs by their name in ``update.codec``. ``rows`` is missing, because it depends on the model;
#: see :mod:`vcasgd.learning.encodings.rows`.
CODECS: dict[str, type[Codec]] = {
    "float32": Float32,
    "bfloat16": BFloat16,
    "int8": Int8,
    "int2": Int2,
    "topk": TopK,
    "partition": Partition,
}
