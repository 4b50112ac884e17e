"""Transfer of updates from a worker to the parameter server.

A payload consists of strings of about 1 MiB. The header is one stream entry, which is written
last and refused if it does not continue its subtask. The names of chunks are derived from the
header, never received.

Push slots limit the updates in the tensors server to what it can hold (back-pressure). A worker
takes a slot before it writes a payload, and the commit that processes the update releases it. The
parameter server sets the number of slots. The slot of a worker that went silent is released, and
its payload deleted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash
from redis.exceptions import NoScriptError

from vcasgd.errors import InvalidUpdate, StoreFull, StoreUnavailable
from vcasgd.learning.encodings.payload import EncodedVector
from vcasgd.store.bulk_transfer import DEPTH, BulkTransfer, Command, Missing, WrongLength
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.chunks import CHUNK_BYTES, chunk_count, chunks_of
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import Meta
from vcasgd.store.tensors.snapshot_index import MAX_PINS
from vcasgd.store.tensors.snapshot_store import REMOVED_CHUNKS

#: Seconds after which payload chunks without a stream entry expire.
PAYLOAD_SECONDS = 3600
#: Bytes of a snapshot that a worker lets come with the status of its updates.
SMALL_SNAPSHOT = 1 << 18

ALL_SLOTS_TAKEN = "all push slots are taken: the tensors server has no room for another update"
#: Place in the stream of commits before the first one, for :meth:`UpdateSender.wait_for_commit`.
NO_COMMIT = b"0-0"

#: Payload of a push: bytes, or a vector that is encoded while it is sent.
Payload = memoryview | EncodedVector

#: Subtask of an update, its epoch, the sample at which it ends, and its name.
Pushed = tuple[int, int, int, str]


@dataclass(frozen=True)
class StreamEntry:
    """An entry of the stream, not parsed yet."""

    id: str
    header: bytes


@dataclass(frozen=True)
class Arrivals:
    """The oldest entries of a stream after the entry ``after``."""

    after: str
    entries: list[StreamEntry]


@dataclass(frozen=True)
class PushResult:
    """Answer to a push; ``position`` of the subtask, −1 for finished epochs."""

    accepted: bool
    position: int


@dataclass(frozen=True)
class UpdateStatus:
    """Status of several updates.

    ``version`` is that of the present snapshot, with the token of its writer. Each of
    ``outcomes`` is ``applied``, ``pending``, ``lost`` or ``rejected:<reason>``. Up to the version
    ``safe``, everything is on the replicas, if there are any. ``meta`` describes the snapshot if it
    was asked for and is not the one that the worker has; ``content`` is its only chunk if that was
    asked for, too, or empty.
    """

    version: tuple[int, int]
    safe: int
    outcomes: list[str]
    meta: Meta | None = None
    content: bytes = b""


def payload_keys(keys: TensorKeys, header: Header, size: int) -> list[str]:
    return [keys.payload_chunk(header.update, index) for index in range(chunk_count(size))]


def _chunks(payload: Payload) -> Iterable[memoryview]:
    return chunks_of(payload) if isinstance(payload, memoryview) else payload.chunks(CHUNK_BYTES)


class UpdateSender:
    """Sender of a worker's updates for one shard. ``key`` signs headers, if workers have keys."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys, key: str | None = None) -> None:
        self._tensors = tensors
        self._keys = keys
        self._key = key
        self._transfer = BulkTransfer(tensors)
        self._slots = PushSlots(tensors, keys)
        #: True if the last push found no room. The next payload is sent only once it has a slot.
        self._crowded = False
        self._begin = tensors.script("tensors/begin")
        self._push = tensors.script("tensors/push")
        self._status = tensors.script("tensors/status")

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> int:
        """Return the sample to train a subtask from, and invalidate its older leases.

        Raises :class:`~vcasgd.errors.Fenced` if a newer lease exists, and
        :class:`~vcasgd.errors.SnapshotMissing`.
        """
        keys = self._keys
        return int(
            self._begin(
                keys=[keys.meta, keys.applied, keys.pushed, keys.tokens],
                args=[subtask, epoch, size, token],
            )
        )

    def push(
        self, header: Header, epoch: int, payload: Payload, after: Sequence[str] = ()
    ) -> PushResult:
        """Write the payload, then the entry. You may repeat it with the same header.

        Raises :class:`~vcasgd.errors.StoreFull` until the updates named by ``after`` are processed.
        Also raises :class:`~vcasgd.errors.Fenced`, :class:`~vcasgd.errors.SnapshotMissing`,
        :class:`~vcasgd.errors.StoreUnavailable`.
        """
        names = payload_keys(self._keys, header, len(payload))
        try:
            answer, position = self._write(header, epoch, names, payload, after)
        except StoreFull:
            self._crowded = True
            raise
        self._crowded = False
        if answer == b"incomplete":
            raise StoreUnavailable("the tensors server lost a part of a pushed update")
        return PushResult(answer == b"accepted", int(position))

    def _write(
        self,
        header: Header,
        epoch: int,
        names: Sequence[str],
        payload: Payload,
        after: Sequence[str],
    ) -> Any:
        """Write payload and entry, and return the answer of the script."""
        if len(names) == 1 and not after and not self._crowded:
            with suppress(NoScriptError):
                return self._write_in_one_trip(header, epoch, names, payload)
        digest = xxhash.xxh3_64()
        self._take_slot(header.update, after)
        items = self._renewing_slot(header.update, names, _chunks(payload), digest)
        self._transfer.store(items, expire=PAYLOAD_SECONDS)
        keys, args = self._entry(header, epoch, names, digest)
        return self._push(keys=keys, args=args)

    def _write_in_one_trip(
        self, header: Header, epoch: int, names: Sequence[str], payload: Payload
    ) -> Any:
        """Take the slot, write a payload of one chunk, and add the entry, in one round trip.

        A payload without a slot gets no entry, and is deleted.
        """
        digest = xxhash.xxh3_64()
        items = self._hashed(names, _chunks(payload), digest)

        def entry() -> Command:
            keys, args = self._entry(header, epoch, names, digest)
            return ("EVALSHA", self._push.sha, len(keys), *keys, *args)

        command = self._slots.command(header.update)
        slot, answer = self._transfer.store_between(command, items, entry, expire=PAYLOAD_SECONDS)
        if not slot:
            raise StoreFull(ALL_SLOTS_TAKEN)
        return answer

    def _entry(
        self, header: Header, epoch: int, names: Sequence[str], digest: xxhash.xxh3_64
    ) -> tuple[list[str], list[Any]]:
        """Return the keys and arguments of the script that adds an update's entry."""
        keys = self._keys
        if header.checksum is None:
            header = header.model_copy(update={"checksum": digest.intdigest()})
        if self._key is not None:
            header = header.signed(self._key, keys)
        return (
            [keys.meta, keys.applied, keys.pushed, keys.tokens, keys.stream, keys.push_slots,
             *names],
            [header.subtask, epoch, header.start, header.stop, header.token, header.update,
             header.model_dump_json()],
        )  # fmt: skip

    @staticmethod
    def _hashed(
        names: Sequence[str], chunks: Iterable[memoryview], digest: xxhash.xxh3_64
    ) -> Iterator[tuple[str, memoryview]]:
        for name, chunk in zip(names, chunks, strict=True):
            # Data that is read here is in the processor's cache when it is sent.
            digest.update(chunk)
            yield name, chunk

    def _renewing_slot(
        self,
        update: str,
        names: Sequence[str],
        chunks: Iterable[memoryview],
        digest: xxhash.xxh3_64,
    ) -> Iterator[tuple[str, memoryview]]:
        """Yield the chunks and renew the update's slot meanwhile. Raises :class:`StoreFull`."""
        renew_at = time.monotonic() + RENEW_SECONDS
        for item in self._hashed(names, chunks, digest):
            if time.monotonic() >= renew_at:
                self._take_slot(update)
                renew_at = time.monotonic() + RENEW_SECONDS
            yield item

    def _take_slot(self, update: str, after: Sequence[str] = ()) -> None:
        if not self._slots.take(update, after):
            raise StoreFull(ALL_SLOTS_TAKEN)

    def status(
        self,
        pushed: Sequence[Pushed],
        newer_than: tuple[int, int] | None = None,
        chunk: str = "",
    ) -> UpdateStatus:
        """Return the present version and the outcomes of updates.

        ``newer_than``, a version and its writer, asks for the description of any other snapshot,
        and ``chunk`` for the content of its chunk of this name.
        Raises :class:`~vcasgd.errors.SnapshotMissing`.
        """
        keys, args = self._question(pushed, newer_than, chunk)
        return _status_of(self._status(keys=keys, args=args))

    def status_after_commit(
        self,
        seconds: float,
        seen: bytes,
        pushed: Sequence[Pushed],
        newer_than: tuple[int, int] | None = None,
        chunk: str = "",
    ) -> tuple[bytes, UpdateStatus]:
        """Do :meth:`wait_for_commit`, then :meth:`status`, in one round trip."""
        keys, args = self._question(pushed, newer_than, chunk)
        milliseconds = max(1, int(seconds * 1000))
        try:
            # Not as a script of the pipeline, which would ask first whether the server has it.
            with self._tensors.pipeline() as pipe:
                pipe.xread({self._keys.news: seen}, count=1, block=milliseconds)
                pipe.evalsha(self._status.sha, len(keys), *keys, *args)
                streams, status = pipe.execute()
        except NoScriptError:
            seen = self.wait_for_commit(seconds, seen)
            return seen, self.status(pushed, newer_than, chunk)
        return _last_seen(streams, seen), _status_of(status)

    def _question(
        self, pushed: Sequence[Pushed], newer_than: tuple[int, int] | None, chunk: str
    ) -> tuple[list[str], list[Any]]:
        keys = self._keys
        has = "" if newer_than is None else f"{newer_than[0]} {newer_than[1]}"
        return (
            [keys.meta, keys.applied, keys.pushed, keys.rejected],
            [has, chunk, *(word for update in pushed for word in update)],
        )

    def wait_for_commit(self, seconds: float, seen: bytes) -> bytes:
        """Wait for the first commit after ``seen``, for at most ``seconds``.

        ``seen`` is the result of the last call, or :data:`NO_COMMIT`.
        """
        streams = self._tensors.xread(
            {self._keys.news: seen}, count=1, block=max(1, int(seconds * 1000))
        )
        return _last_seen(streams, seen)


def _last_seen(streams: Any, seen: bytes) -> bytes:
    for _stream, entries in streams or ():
        seen = entries[-1][0]
    return seen


def _status_of(answer: Sequence[Any]) -> UpdateStatus:
    version, token, safe, meta, content, *outcomes = answer
    return UpdateStatus(
        (int(version), int(token)),
        int(safe),
        [outcome.decode() for outcome in outcomes],
        Meta.from_json(meta) if meta else None,
        content,
    )


class UpdateReader:
    """Reader of the updates for one shard, used by its parameter server."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys) -> None:
        self._tensors = tensors
        self._keys = keys
        self._transfer = BulkTransfer(tensors)

    def waiting(self) -> int:
        return int(self._tensors.xlen(self._keys.stream))

    def read(self, limit: int, after: str = "0-0") -> list[StreamEntry]:
        """Return the oldest updates in the stream after an entry, at most ``limit``, without
        blocking.

        Published updates have left the stream, so a restarted parameter server only has to read
        from its beginning.
        """
        return _entries(self._tensors.xrange(self._keys.stream, min=f"({after}", count=limit))

    def receive(self, header: Header, payload: memoryview) -> Iterator[memoryview]:
        """Receive the encoded payload into memory of the expected size, and yield each chunk.

        Inspect a chunk at once, while it is in the processor's cache.
        Raises :class:`InvalidUpdate` (``length``, ``missing``, ``checksum``).
        """
        if header.size != payload.nbytes:
            raise InvalidUpdate(
                f"payload of {header.size} bytes, {payload.nbytes} expected", reason="length"
            )
        digest, chunks = xxhash.xxh3_64(), chunks_of(payload)
        keys = payload_keys(self._keys, header, payload.nbytes)
        try:
            for index in self._transfer.load(keys, chunks):
                digest.update(chunks[index])
                yield chunks[index]
        except Missing as error:
            raise InvalidUpdate("a part of the payload is missing", reason="missing") from error
        except WrongLength as error:
            raise InvalidUpdate(f"chunk {error.index} is {error.value}", reason="length") from error
        if digest.intdigest() != header.checksum:
            raise InvalidUpdate("the checksum does not match", reason="checksum")


def wait_for_entries(
    tensors: RedisClient, streams: Mapping[str, str], seconds: float, limit: int = 1
) -> dict[str, Arrivals]:
    """Wait until a stream has an entry after the one that is its value, at most ``seconds``.

    Returns at most ``limit`` entries of each stream.
    """
    if not streams:
        time.sleep(seconds)
        return {}
    answer = tensors.xread(dict(streams), count=limit, block=max(1, int(seconds * 1000)))
    entries = {stream.decode(): _entries(found) for stream, found in answer}
    return {key: Arrivals(after, entries.get(key, [])) for key, after in streams.items()}


def _entries(answer: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[StreamEntry]:
    return [StreamEntry(at.decode(), data.get(b"h", b"")) for at, data in answer]


# -- push slots ------------------------------------------------------------------------------------

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


def window(limit: int, clients: int, model: int, payload: int, share: float = 1.0) -> int:
    """Return the number of slots for payloads of ``payload`` bytes and a model of ``model`` bytes.

    ``limit`` is the server's memory limit in bytes, 0 for none, ``clients`` the number of its
    connections, and ``share`` the job's part of its memory. Memory is reserved for the present
    snapshot, the next one (which takes the place of the previous one unless it is small), the
    pinned ones, half a model for shared second moments, and for answers to readers. The result is
    at least 1, so that a job that is too large for its server still makes progress.
    """
    if not limit:
        return MAX_SLOTS
    # About every second connection fetches snapshots.
    answers = clients // 2 * min(DEPTH * CHUNK_BYTES, model)
    versions = 2 if chunk_count(model) > REMOVED_CHUNKS else 3
    room = (limit * USABLE - answers) * share - model * (versions + 0.5 + MAX_PINS)
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
        limit = int(self._tensors.info("memory")["maxmemory"])
        clients = int(self._tensors.info("clients")["connected_clients"])
        self._tensors.set(self._keys.window, window(limit, clients, model, payload, share))
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


def _slot_ms() -> int:
    return int(SLOT_SECONDS * 1000)
