"""Back-pressure: so many updates may be on their way at a time as the tensors server can hold.

A worker takes a place before it writes a payload, and the commit that has dealt with the
update gives the place back. The parameter server says how many there are. A place whose
worker fell silent is taken back, together with what was written.
"""

from __future__ import annotations

from dataclasses import dataclass

from vcasgd.store.bulk import DEPTH
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.bf16_split import CHUNK_BYTES, chunk_count
from vcasgd.store.tensors.snapshots import MOST_PINS

#: a silent worker's place is taken back after so long
PLACE_SECONDS = 30.0
#: a worker that is still writing says so this often
RENEW_SECONDS = 5.0
#: of the server's limit; the rest is for stream entries, records and what the allocator wastes
USABLE = 0.9
#: places where memory is not limited
MOST_PLACES = 1024


@dataclass(frozen=True)
class MemoryLimits:
    """Of a tensors server, in bytes. ``limit`` 0: not limited. ``clients``: connections."""

    limit: int
    clients: int


def window(memory: MemoryLimits, model: int, payload: int, share: float = 1.0) -> int:
    """How many payloads of ``payload`` bytes may be on their way for a model of ``model`` bytes.

    ``share``: the part of the server that is this job's. Room is left for the present snapshot,
    the one before, the next one and the pinned ones, and for what is on its way to readers. At
    least 1: a job that is too large for its server makes what progress it can.
    """
    if not memory.limit:
        return MOST_PLACES
    # about every second connection is one of those that fetch
    answers = memory.clients // 2 * min(DEPTH * CHUNK_BYTES, model)
    room = (memory.limit * USABLE - answers) * share - model * (3 + MOST_PINS)
    # a chunk that arrives is not part of its string yet
    place = payload + min(CHUNK_BYTES, payload)
    return min(MOST_PLACES, max(1, int(room // max(place, 1))))


class PushSlots:
    """Of one shard of one job."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys) -> None:
        self._tensors = tensors
        self._keys = keys
        self._reserve = tensors.script("tensors/reserve")
        self._reap = tensors.script("tensors/reap")

    def take(self, update: str) -> bool:
        """A place for :data:`PLACE_SECONDS`, or for longer if it is held already.

        Raises :class:`~vcasgd.errors.SnapshotMissing`: what nobody would take is not written.
        """
        return bool(
            self._reserve(
                keys=[self._keys.places, self._keys.window, self._keys.meta],
                args=[update, int(PLACE_SECONDS * 1000)],
            )
        )

    # -- the parameter server's side -----------------------------------------------------------

    def tend(self, model: int, payload: int, share: float) -> None:
        """Says how many places there are, see :func:`window`, and takes back silent ones."""
        self._tensors.set(self._keys.window, window(self._memory(), model, payload, share))
        self.reap(chunk_count(payload))

    def reap(self, chunks: int) -> int:
        """Takes back places whose time is over; payloads have at most ``chunks`` chunks.

        Returns how many there were.
        """
        keys, now = self._keys, _milliseconds(self._tensors.time())
        silent = [
            name.decode(errors="replace")
            for name in self._tensors.zrangebyscore(keys.places, "-inf", now, start=0, num=100)
        ]
        payloads = [keys.payload_chunk(name, index) for name in silent for index in range(chunks)]
        return int(self._reap(keys=[keys.places, keys.stream, *payloads], args=[chunks, *silent]))

    def _memory(self) -> MemoryLimits:
        memory, clients = self._tensors.info("memory"), self._tensors.info("clients")
        return MemoryLimits(int(memory["maxmemory"]), int(clients["connected_clients"]))


def _milliseconds(clock: tuple[int, int]) -> int:
    seconds, microseconds = clock
    return seconds * 1000 + microseconds // 1000
