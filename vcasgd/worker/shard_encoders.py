"""The encoders of a worker's updates, one for each shard."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from vcasgd.learning.encodings.encoder import Encoder
from vcasgd.learning.encodings.payload import EncodedVector
from vcasgd.learning.vector import Floats
from vcasgd.worker.shard_link import ShardLink


class ShardEncoders:
    """Thread-safe: the links' threads encode what a worker's copy has learned."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self._encoders = encoders
        self._lock = threading.Lock()
        #: Rollbacks before the model whose updates the encoders keep parts of.
        self.rollbacks = 0

    def follow_rollback(self, rollbacks: int) -> None:
        """Forget what was kept back of a model that went back."""
        with self._lock:
            self.rollbacks = rollbacks
            for encoder in self._encoders:
                encoder.reset()

    def encode(self, shard: int, update: Floats, *, last: bool) -> EncodedVector:
        """Encode a shard's part of an update, float32 [floats]."""
        with self._lock:
            return self._encoders[shard].encode(update, last=last)

    def encode_part(
        self, shard: int, update: Floats, *, rollbacks: int, last: bool
    ) -> EncodedVector:
        """Encode a part's update, float32 [part.floats], of a model after ``rollbacks``."""
        with self._lock:
            encoded = self._encoders[shard].encode_part(update, last=last)
            if rollbacks != self.rollbacks:
                # What it has kept back is of a model that diverged.
                self._encoders[shard].reset()
        return encoded

    def have_residual(self, links: Collection[ShardLink]) -> bool:
        """Return True if a part of the updates of one of the links is or will be kept back."""
        encoders = [(link, self._encoders[link.part.shard]) for link in links]
        return any(
            encoder.has_residual or not (encoder.is_exact or link.updates.encoded)
            for link, encoder in encoders
        )
