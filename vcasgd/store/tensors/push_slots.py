"""Back-pressure: push slots limit the updates in the tensors server to what it can hold.

A worker takes a slot before it writes a payload, and the commit that processes the update
releases the slot. The parameter server sets the number of slots. The slot of a worker that went
silent is released, and its payload deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vcasgd.store.bulk_transfer import DEPTH, Command
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.chunks import CHUNK_BYTES, chunk_count
from vcasgd.store.tensors.snapshot_index import MAX_PINS
from vcasgd.store.tensors.snapshot_store import REMOVED_CHUNKS

#: Seconds after which the slot of a silent worker is released.
SLOT_SECONDS = 30.0
#: Seconds between two renewals by a worker that is still writing.
RENEW_SECONDS = 5.0
#: Usable part of the memory limit; the rest is for stream entries, records and fragmentation.
USABLE = 0.9
#: Keys of one call that releases expired slots. It blocks the server for tens of milliseconds.
MAX_REAPED_CHUNKS = 10_000
#: Slots of a shard if memory is not limited.
MAX_SLOTS = 1024


@dataclass(frozen=True)
class MemoryLimits:
    """Memory limit of a tensors server in bytes, 0 for none, and its number of connections."""

    limit: int
    clients: int


def window(memory: MemoryLimits, model: int, payload: int, share: float = 1.0) -> int:
    """Return the number of slots for payloads of ``payload`` bytes and a model of ``model`` bytes.

    ``share`` is the job's part of the server's memory. Memory is reserved for the present
    snapshot, the next one (which takes the place of the previous one unless it is small), the
    pinned ones, half a model for shared second moments, and for answers to readers. The result is
    at least 1, so that a job that is too large for its server still makes progress.
    """
    if not memory.limit:
        return MAX_SLOTS
    # About every second connection fetches snapshots.
    answers = memory.clients // 2 * min(DEPTH * CHUNK_BYTES, model)
    versions = 2 if chunk_count(model) > REMOVED_CHUNKS else 3
    room = (memory.limit * USABLE - answers) * share - model * (versions + 0.5 + MAX_PINS)
    # A chunk that arrives is buffered before it becomes a string.
    slot = payload + min(CHUNK_BYTES, payload)
    return min(MAX_SLOTS, max(1, int(room // max(slot, 1))))


class PushSlots:
    """The push slots of one shard of one job."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys) -> None:
        self._tensors = tensors
        self._keys = keys
        self._reserve = tensors.script("tensors/reserve")
        self._reap = tensors.script("tensors/reap")

    def take(self, update: str, after: Sequence[str] = ()) -> bool:
        """Take or renew an update's slot for :data:`SLOT_SECONDS`.

        Returns False if all slots are taken, or if one of the updates ``after`` which it comes is
        not processed yet. Raises :class:`~vcasgd.errors.SnapshotMissing`, because no server would
        read the update.
        """
        return bool(self._reserve(keys=self._reserve_keys, args=[update, _slot_ms(), *after]))

    def command(self, update: str) -> Command:
        """Return the command that :meth:`take` sends."""
        keys = self._reserve_keys
        return ("EVALSHA", self._reserve.sha, len(keys), *keys, update, _slot_ms())

    @property
    def _reserve_keys(self) -> list[str]:
        return [self._keys.push_slots, self._keys.window, self._keys.meta]

    # -- for the parameter server --------------------------------------------------------------

    def update(self, model: int, payload: int, share: float) -> None:
        """Set the number of slots, see :func:`window`, and release expired ones."""
        self._tensors.set(self._keys.window, window(self._memory(), model, payload, share))
        self.reap(chunk_count(payload))

    def reap(self, chunks: int) -> int:
        """Release expired slots, not all at once if there are many, and return their number.

        Payloads have at most ``chunks`` chunks.
        """
        keys, now = self._keys, int(self._tensors.now() * 1000)
        most = max(1, MAX_REAPED_CHUNKS // max(chunks, 1))
        expired = [
            name.decode(errors="replace")
            for name in self._tensors.zrangebyscore(keys.push_slots, "-inf", now, start=0, num=most)
        ]
        payloads = [keys.payload_chunk(name, index) for name in expired for index in range(chunks)]
        return int(
            self._reap(
                keys=[keys.push_slots, keys.stream, *payloads], args=[chunks, _slot_ms(), *expired]
            )
        )

    def _memory(self) -> MemoryLimits:
        memory, clients = self._tensors.info("memory"), self._tensors.info("clients")
        return MemoryLimits(int(memory["maxmemory"]), int(clients["connected_clients"]))


def _slot_ms() -> int:
    return int(SLOT_SECONDS * 1000)
