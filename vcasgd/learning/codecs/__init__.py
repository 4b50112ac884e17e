"""How numbers are encoded for the wire: raw and little-endian, never a pickle.

What an update of parameters and statistics looks like as a whole is in
:mod:`vcasgd.learning.encoding`. NumPy does the reading because torch refuses read-only memory,
and what arrives from a socket is read-only.

``base``    what a codec is
``dense``   every number: ``float32``, ``bfloat16``, ``int8``
``sparse``  some numbers of each block: ``topk``, ``partition``
"""

from __future__ import annotations

from vcasgd.errors import SpecError
from vcasgd.learning.codecs.base import Codec
from vcasgd.learning.codecs.dense import BFloat16, Float32, Int8
from vcasgd.learning.codecs.sparse import Partition, TopK

__all__ = ["CODECS", "BFloat16", "Codec", "Float32", "Int8", "Partition", "TopK", "make_codec"]

#: by the name in ``update.codec`` of a job; ``rows`` needs to know the model, and is not one of
#: them, see :mod:`vcasgd.learning.rows`
CODECS: dict[str, type[Codec]] = {
    "float32": Float32,
    "bfloat16": BFloat16,
    "int8": Int8,
    "topk": TopK,
    "partition": Partition,
}


def make_codec(name: str) -> Codec:
    """The codec of that name. Raises :class:`SpecError` if there is none."""
    if name not in CODECS:
        raise SpecError(
            f"update.codec: unknown codec {name!r}",
            remedy=f"choose one of {', '.join(CODECS)}",
            field="update.codec",
        )
    return CODECS[name]()
