"""Payloads whose bytes are packed with a Huffman code, without loss.

With few levels per number, most codes are 0, so some bytes are much more frequent than others. The
code is that of deflate (RFC 1951) without a search for repetitions, of which there are none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.blocks import BlockFormat, BlockPiece
from vcasgd.learning.encodings.payload import EncodedBytes, EncodedVector
from vcasgd.learning.vector import LARGEST_VALUE

#: A deflate stream without a header and a checksum; the update has its own.
_RAW = -zlib.MAX_WBITS
#: Bytes packed at a time.
_CHUNK_BYTES = 1 << 20
#: Most bytes that packing adds to bytes that can't be packed: 5 for each stored block of at least
#: 16 kB, and some at the end.
_ADDED_SHARE, _ADDED = 1 / 1024, 64


@dataclass(frozen=True)
class PackedFormat:
    """Format of payloads of ``inner`` that are packed. Their length varies."""

    inner: BlockFormat

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def size(self) -> int:
        """Bytes of the largest payload."""
        return self.inner.size + int(self.inner.size * _ADDED_SHARE) + _ADDED

    def encode(self, vector: Tensor) -> EncodedBytes:
        return self.pack(self.inner.encode(vector))

    def pack(self, encoded: EncodedVector) -> EncodedBytes:
        """Pack a payload of the inner format."""
        packer = zlib.compressobj(wbits=_RAW, strategy=zlib.Z_HUFFMAN_ONLY)
        parts = [packer.compress(chunk) for chunk in encoded.chunks(_CHUNK_BYTES)]
        return EncodedBytes(encoded.codec, memoryview(b"".join([*parts, packer.flush()])))

    def fits(self, size: int) -> bool:
        return 0 < size <= self.size

    def max_magnitude(self, chunk: memoryview, at: int) -> float:  # noqa: ARG002 - not known yet
        """Return 0, because packed bytes don't show it; :meth:`unpack` checks it."""
        return 0.0

    def unpack(self, payload: memoryview) -> memoryview:
        """Return the payload of the inner format.

        Never needs more memory than that has. Raises :class:`InvalidUpdate` (``packing``,
        ``non-finite``).
        """
        stream = zlib.decompressobj(_RAW)
        try:
            unpacked = bytearray(stream.decompress(payload, self.inner.size + 1))
        except zlib.error as error:
            raise InvalidUpdate("the payload can't be unpacked", reason="packing") from error
        if len(unpacked) != self.inner.size or not stream.eof or stream.unused_data:
            raise InvalidUpdate("the unpacked payload has another length", reason="packing")
        # NaN fails any comparison.
        if not self.inner.max_magnitude(memoryview(unpacked), 0) <= LARGEST_VALUE:
            raise InvalidUpdate("the update is not finite, or far too large", reason="non-finite")
        return self.inner.unpack(memoryview(unpacked))

    def pieces(self, most: int) -> Iterator[BlockPiece]:
        return self.inner.pieces(most)

    def scratch(self, most: int) -> Tensor:
        return self.inner.scratch(most)
