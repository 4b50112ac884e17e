"""Steps of a published model: what a worker needs to get from one version to the next.

The parameter server blends updates into the *exact* model. Workers train from the *published* one,
which follows it by encoded steps: each step is the difference between the two in the job's
encoding, and moves the published model by exactly what a worker decodes. What an encoding loses
stays a difference, so it is part of the next step. This is error feedback in the direction of
fetches (DoubleSqueeze, Tang 2019, arXiv 1905.05957).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.payload import PayloadFormat
from vcasgd.learning.vector import LARGEST_VALUE

#: Numbers decoded at a time: 1 MiB of float32, which stays in the cache.
PIECE_FLOATS = 1 << 18
#: Bytes encoded at a time.
ENCODED_BYTES = 1 << 20


@dataclass(frozen=True)
class StepFormat:
    """Format of a shard's steps.

    A step has differences of the first ``parameters`` elements, and values of the statistics
    after them.
    """

    payload: PayloadFormat
    parameters: int

    def advance(self, exact: Tensor, published: Tensor) -> memoryview | None:
        """Move a published model towards the exact one, float32 ``[floats]`` each.

        Returns the step, or None if the models are too far apart to encode their difference. The
        published model is then unchanged.
        """
        difference = exact.clone()
        difference[: self.parameters].sub_(published[: self.parameters])
        step = bytearray().join(self.payload.encode(difference).chunks(ENCODED_BYTES))
        try:
            self.apply(memoryview(step), published)
        except InvalidUpdate:
            return None
        return memoryview(step)

    def apply(self, step: memoryview, published: Tensor) -> None:
        """Move a published model, float32 ``[floats]``, by a step.

        The memory of ``step`` must be writable. Raises :class:`InvalidUpdate`; the model is then
        unchanged.
        """
        if not self.payload.fits(step.nbytes):
            raise InvalidUpdate(f"step of {step.nbytes} bytes", reason="length")
        unpacked = self._unpacked(step)
        scratch = self.payload.scratch(PIECE_FLOATS)
        for piece in self.payload.pieces(PIECE_FLOATS):
            numbers = piece.decode(unpacked, scratch)
            edge = min(max(self.parameters, piece.start), piece.stop)
            trained = edge - piece.start
            # Not fused with the decoding, so that every machine rounds alike.
            published[piece.start : edge].add_(numbers[:trained])
            published[edge : piece.stop].copy_(numbers[trained:])

    def _unpacked(self, step: memoryview) -> memoryview:
        # NaN fails any comparison.
        if not self.payload.max_magnitude(step, 0) <= LARGEST_VALUE:
            raise InvalidUpdate("the step is not finite, or far too large", reason="non-finite")
        return self.payload.unpack(step)


def checksum(vector: Tensor) -> int:
    """Return the sum of the bits of float32 ``[n]``, read as int32, modulo 2⁵³.

    It finds accidental differences, at the speed of memory.
    """
    bits = vector.view(torch.int32)
    sums = (bits[at : at + PIECE_FLOATS].sum() for at in range(0, len(bits), PIECE_FLOATS))
    return sum(map(int, sums)) % 2**53
