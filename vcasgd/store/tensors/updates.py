"""Updates on their way from a worker to the parameter server.

The payload travels as plain strings of about 1 MiB, the header as one stream entry that is
written last and refused where it does not continue its subtask. Nothing that arrives is
trusted: a header is parsed strictly, and the names of chunks are derived, never taken.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vcasgd.errors import InvalidUpdate, StoreFull, StoreUnavailable
from vcasgd.learning.encodings.payload import EncodedVector
from vcasgd.store.bulk import BulkTransfer, Missing, WrongLength
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.bf16_split import CHUNK_BYTES, chunk_count, chunks_of
from vcasgd.store.tensors.push_slots import RENEW_SECONDS, PushSlots

#: payload chunks whose update never came into the stream vanish by themselves
PAYLOAD_SECONDS = 3600
#: headers are small; a longer one is not parsed at all
LONGEST_HEADER = 1 << 20
#: of a field's name in a message
LONGEST_NAME = 64
#: the reason for which a header is refused that somebody else wrote
UNSIGNED = "signature"

#: what is pushed: bytes, or a vector that becomes bytes while it is sent
Payload = memoryview | EncodedVector

_Count = Annotated[int, Field(ge=0, lt=2**53)]


class Header(BaseModel):
    """What an update says of itself.

    ``start`` and ``stop`` are samples of the subtask, ``base`` is the version of this shard that
    it was trained from, ``size`` and ``checksum`` (:func:`checksum`) are of the encoded part of
    the vector that belongs to the shard; a missing checksum is found while the payload is sent.
    ``integers`` is base64 of int64, or nothing where they are as in the base; they travel with
    shard 0 only. ``signature`` is the HMAC-SHA256 of the rest under its worker's key, or nothing
    where workers have none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    update: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,150}$")
    worker: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")
    shard: _Count = 0
    subtask: _Count
    start: _Count
    stop: _Count
    base: _Count
    token: _Count
    codec: str = Field(max_length=32)
    size: _Count
    checksum: int | None = Field(default=None, ge=0, lt=2**64)
    layout: str = Field(max_length=64)
    integers: str = Field(default="", max_length=LONGEST_HEADER // 2)
    # far beyond any real loss, and so that sums of these stay finite
    loss_sum: float = Field(default=0.0, ge=-1e200, le=1e200, allow_inf_nan=False)
    signature: str = Field(default="", max_length=64)

    def signed(self, key: str, keys: TensorKeys) -> Header:
        """The same header under its worker's key, for the one shard that ``keys`` are of."""
        return self.model_copy(update={"signature": self._signature(key, keys)})

    def check_signature(self, key: str, keys: TensorKeys) -> None:
        """That it was written by whom it names, for this shard. Raises :class:`InvalidUpdate`
        (:data:`UNSIGNED`)."""
        expected = self._signature(key, keys).encode()
        # payloads whose names begin with the worker's can't be written by any other
        if not (
            hmac.compare_digest(self.signature.encode(), expected)
            and self.update.startswith(f"{self.worker}.")
        ):
            raise InvalidUpdate(f"not signed by {self.worker}, whom it names", reason=UNSIGNED)

    def _signature(self, key: str, keys: TensorKeys) -> str:
        text = keys.prefix + self.model_dump_json(exclude={"signature"})
        return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()

    @classmethod
    def parse(cls, text: bytes) -> Header:
        """Raises :class:`InvalidUpdate` (``header``)."""
        if len(text) > LONGEST_HEADER:
            raise InvalidUpdate("the header is too long", reason="header")
        try:
            header = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            # names of fields that do not exist are the sender's, and go into logs and events
            where = ".".join(str(part) for part in first["loc"])[:LONGEST_NAME]
            raise InvalidUpdate(f"header: {where}: {first['msg']}", reason="header") from error
        if header.checksum is None:
            raise InvalidUpdate("header: checksum: Field required", reason="header")
        # JSON leaves open which one of two counts; what is valid has no others inside
        if len(json.loads(text, object_pairs_hook=list)) != len(header.model_fields_set):
            raise InvalidUpdate("header: a field is there twice", reason="header")
        return header


@dataclass(frozen=True)
class StreamEntry:
    """An entry of the stream as it was read."""

    id: str
    header: bytes


@dataclass(frozen=True)
class Pushed:
    """The answer to a push. ``position``: where the subtask stands, −1 for finished epochs."""

    accepted: bool
    position: int


@dataclass(frozen=True)
class UpdateStatus:
    """``version`` of the present snapshot with the token of its writer; each fate is
    ``applied``, ``pending``, ``lost`` or ``rejected:<reason>``. Up to the version ``safe``
    everything is on the replicas, if there are any."""

    version: tuple[int, int]
    safe: int
    fates: list[str]


def checksum(payload: memoryview | bytes | bytearray) -> int:
    """XXH3, 64 bits. Against accidents, not against malice: a rogue worker can send a wrong
    update with a right checksum."""
    return xxhash.xxh3_64_intdigest(payload)


def payload_keys(keys: TensorKeys, header: Header, size: int) -> list[str]:
    """Of the chunks of a payload of ``size`` bytes."""
    return [keys.payload_chunk(header.update, index) for index in range(chunk_count(size))]


def _chunks(payload: Payload) -> Iterable[memoryview]:
    return chunks_of(payload) if isinstance(payload, memoryview) else payload.chunks(CHUNK_BYTES)


class UpdateSender:
    """The worker's side of one shard. ``key``: signs the headers, where workers have one."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys, key: str | None = None) -> None:
        self._tensors = tensors
        self._keys = keys
        self._key = key
        self._wire = BulkTransfer(tensors)
        self._places = PushSlots(tensors, keys)
        self._begin = tensors.script("tensors/begin")
        self._push = tensors.script("tensors/push")
        self._status = tensors.script("tensors/status")
        self._seen = b"0-0"

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> int:
        """From which sample the subtask is to be trained; older leases of it end here.

        Raises :class:`~vcasgd.errors.Fenced` where a newer lease exists, and
        :class:`~vcasgd.errors.SnapshotMissing`.
        """
        keys = self._keys
        return int(
            self._begin(
                keys=[keys.meta, keys.applied, keys.pushed, keys.tokens],
                args=[subtask, epoch, size, token],
            )
        )

    def push(self, header: Header, epoch: int, payload: Payload) -> Pushed:
        """Writes the payload, then the entry. May be repeated with the same header.

        Raises :class:`~vcasgd.errors.Fenced`, :class:`~vcasgd.errors.SnapshotMissing`,
        :class:`~vcasgd.errors.StoreUnavailable`, :class:`~vcasgd.errors.StoreFull`.
        """
        keys = self._keys
        names = payload_keys(keys, header, len(payload))
        digest = xxhash.xxh3_64()
        self._take_place(header.update)
        sent = self._kept(header.update, names, _chunks(payload), digest)
        self._wire.store(sent, expire=PAYLOAD_SECONDS)
        if header.checksum is None:
            header = header.model_copy(update={"checksum": digest.intdigest()})
        if self._key is not None:
            header = header.signed(self._key, keys)
        answer, position = self._push(
            keys=[keys.meta, keys.applied, keys.pushed, keys.tokens, keys.stream, keys.places,
                  *names],
            args=[header.subtask, epoch, header.start, header.stop, header.token, header.update,
                  header.model_dump_json()],
        )  # fmt: skip
        if answer == b"incomplete":
            raise StoreUnavailable("the tensors server lost a part of what was pushed")
        return Pushed(answer == b"accepted", int(position))

    def _kept(
        self,
        update: str,
        names: Sequence[str],
        chunks: Iterable[memoryview],
        digest: xxhash.xxh3_64,
    ) -> Iterator[tuple[str, memoryview]]:
        """The chunks, while the update keeps its place. Raises :class:`StoreFull`."""
        renew_at = time.monotonic() + RENEW_SECONDS
        for name, chunk in zip(names, chunks, strict=True):
            if time.monotonic() >= renew_at:
                self._take_place(update)
                renew_at = time.monotonic() + RENEW_SECONDS
            # what is read here is in the processor's cache when it is sent
            digest.update(chunk)
            yield name, chunk

    def _take_place(self, update: str) -> None:
        if not self._places.take(update):
            raise StoreFull("as many updates wait as the tensors server has room for")

    def status(self, pushed: Sequence[tuple[int, int, int, str]]) -> UpdateStatus:
        """The present version and what became of updates.

        Each is given as subtask, its epoch, the sample at which it ends, and the update's
        name. Raises :class:`~vcasgd.errors.SnapshotMissing`.
        """
        keys = self._keys
        version, token, safe, *fates = self._status(
            keys=[keys.meta, keys.applied, keys.pushed, keys.rejected],
            args=[part for each in pushed for part in each],
        )
        return UpdateStatus(
            (int(version), int(token)), int(safe), [fate.decode() for fate in fates]
        )

    def await_news(self, seconds: float) -> None:
        """Returns when something was committed since the last call did, or after ``seconds``."""
        found = self._tensors.xread(
            {self._keys.news: self._seen}, count=1, block=max(1, int(seconds * 1000))
        )
        for _stream, entries in found:
            self._seen = entries[-1][0]


class UpdateReader:
    """The parameter server's side of one shard."""

    def __init__(self, tensors: RedisClient, keys: TensorKeys) -> None:
        self._tensors = tensors
        self._keys = keys
        self._wire = BulkTransfer(tensors)

    @property
    def stream(self) -> str:
        return self._keys.stream

    def waiting(self) -> int:
        """Updates in the stream."""
        return int(self._tensors.xlen(self._keys.stream))

    def read(self, limit: int) -> list[StreamEntry]:
        """The oldest updates that wait, without waiting for any.

        What was dealt with has left the stream, so reading from its beginning is all that a
        parameter server has to do after a crash.
        """
        found = self._tensors.xrange(self._keys.stream, count=limit)
        return [StreamEntry(at.decode(), data.get(b"h", b"")) for at, data in found]

    def receive(self, header: Header, payload: memoryview) -> Iterator[memoryview]:
        """The encoded payload into memory of the size that is expected; yields each chunk when
        it is there, so that it can be looked at while it is in the processor's cache.

        Raises :class:`InvalidUpdate` (``length``, ``missing``, ``checksum``).
        """
        if header.size != payload.nbytes:
            raise InvalidUpdate(
                f"payload of {header.size} bytes, {payload.nbytes} expected", reason="length"
            )
        digest, chunks = xxhash.xxh3_64(), chunks_of(payload)
        try:
            for index in self._wire.load(self.payload_keys(header, payload.nbytes), chunks):
                digest.update(chunks[index])
                yield chunks[index]
        except Missing as error:
            raise InvalidUpdate("a part of the payload is missing", reason="missing") from error
        except WrongLength as error:
            raise InvalidUpdate(f"chunk {error.index} is {error.found}", reason="length") from error
        if digest.intdigest() != header.checksum:
            raise InvalidUpdate("the checksum does not match", reason="checksum")

    def payload_keys(self, header: Header, size: int) -> list[str]:
        """``size`` is what the job's layout says, never what the header claims."""
        return payload_keys(self._keys, header, size)


def wait_for_entries(tensors: RedisClient, streams: Sequence[str], seconds: float) -> None:
    """Returns when one of the streams has an entry, or after ``seconds``."""
    if not streams:
        time.sleep(seconds)
        return
    tensors.xread(dict.fromkeys(streams, "0-0"), count=1, block=max(1, int(seconds * 1000)))
