"""Object storage in one folder, S3 bucket or GCS bucket, by URL. The only importer of obstore.

One object is the controller's sign of life.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from vcasgd.errors import NotFound, StorageUnavailable
from vcasgd.threads import EssentialThread

#: Limit for one request. Large objects are written and streamed in several requests.
REQUEST_TIME = timedelta(seconds=60)
#: Bytes per chunk of a stream: large enough that a cloud's latency per request does not matter,
#: small enough that many streams fit into memory.
CHUNK_BYTES = 8 << 20
#: Parts of an object that is written in parts: the most that clouds allow, and those under way.
MAX_PARTS, PARTS_AT_A_TIME = 9_999, 2


@dataclass(frozen=True)
class ObjectStream:
    """An object's size in bytes and an iterator over its chunks."""

    size: int
    chunks: Iterator[bytes]


class Storage:
    """Named bytes. Every write is atomic: readers see the old object, the new one, or none."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = _open(url)

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object. Raises :class:`StorageUnavailable`, also if the disk is full."""
        self.put_stream(name, iter((bytes(data),)), len(data))

    def put_stream(self, name: str, chunks: Iterator[bytes], size: int) -> None:
        """Write an object of ``size`` bytes in parts, of which few are in memory at a time.

        Errors of the iterator leave no object. Raises :class:`StorageUnavailable`.
        """
        with _mapped(name):
            obstore.put(
                self._store,
                name,
                chunks,
                use_multipart=size > CHUNK_BYTES,
                chunk_size=max(CHUNK_BYTES, size // MAX_PARTS),
                max_concurrency=PARTS_AT_A_TIME,
            )

    def get(self, name: str) -> bytes:
        """Read a whole object. Raises :class:`NotFound` and :class:`StorageUnavailable`."""
        with _mapped(name):
            return bytes(obstore.get(self._store, name).bytes())

    def stream(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> ObjectStream:
        """Read an object in chunks; at most ``chunk_bytes`` are in memory at a time.

        Each chunk is a request of its own, so a slow reader keeps no connection open and no
        request reaches :data:`REQUEST_TIME`. If the object is replaced meanwhile, chunks of both
        versions may be mixed: stream only objects that are never replaced, or check a digest.

        This method and the iterator raise :class:`NotFound` and :class:`StorageUnavailable`.
        """
        size = self.size(name)
        starts = range(0, size, chunk_bytes)
        return ObjectStream(
            size, (self.read(name, start, min(start + chunk_bytes, size)) for start in starts)
        )

    def size(self, name: str) -> int:
        """Return an object's size in bytes. Raises as :meth:`get` does."""
        with _mapped(name):
            return int(obstore.head(self._store, name)["size"])

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read a range of an object's bytes. Raises as :meth:`get` does."""
        with _mapped(name):
            return bytes(obstore.get_range(self._store, name, start=start, end=end))

    def has(self, name: str) -> bool:
        """Return True if the object exists. Raises :class:`StorageUnavailable`."""
        try:
            self.size(name)
        except NotFound:
            return False
        return True

    def names(self, prefix: str) -> dict[str, int]:
        """Return the names of all objects under a prefix, with their sizes in bytes."""
        with _mapped(prefix):
            pages = obstore.list(self._store, prefix)
            return {str(each["path"]): int(each["size"]) for page in pages for each in page}

    def remove_unfinished(self, prefix: str) -> None:
        """Remove what killed processes left of objects under a prefix, if this is a folder.

        Buckets do so themselves, by a rule for unfinished uploads. An object that is being written
        is lost.
        """
        parts = urlsplit(self.url)
        if parts.scheme == "file":
            # obstore lists no such files.
            for part in Path(parts.path, prefix).glob("*#*"):
                part.unlink(missing_ok=True)

    def move(self, name: str, to: str) -> None:
        """Rename an object, replacing an existing one.

        Raises :class:`NotFound` and :class:`StorageUnavailable`.
        """
        with _mapped(name):
            obstore.rename(self._store, name, to)

    def delete(self, name: str) -> None:
        """Delete an object if it exists. Raises :class:`StorageUnavailable`."""
        with suppress(NotFound), _mapped(name):
            obstore.delete(self._store, name)


def _open(url: str) -> ObjectStore:
    parts = urlsplit(url)
    with _mapped(url):
        if parts.scheme == "file":
            Path(parts.path).mkdir(parents=True, exist_ok=True)
            return from_url(url)
        # The clouds' own endpoints use https; only an AWS_ENDPOINT_URL can name http. Options
        # given here override AWS_ALLOW_HTTP, so http has to be allowed explicitly.
        store: ObjectStore = from_url(
            url, client_options={"timeout": REQUEST_TIME, "allow_http": True}
        )
        return store


@contextmanager
def _mapped(name: str) -> Iterator[None]:
    """Translate the errors of obstore."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{name} is not in the object storage") from error
    except (BaseError, OSError, ValueError) as error:
        raise StorageUnavailable(f"object storage: {name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


log = logging.getLogger(__name__)

#: Object that the controller replaces again and again, beside the packages, which workers' machines
#: may read but not write. Only its changes count, so no clocks are compared.
LIFE_SIGN = "packages/controller"
#: Signs in the time after which a machine without any ends.
SIGNS = 12


class LifeSign(EssentialThread):
    """Thread that replaces the sign after each :meth:`beat`, at most every ``pause_seconds``.

    A storage that is slow or unavailable therefore delays nothing else.
    """

    def __init__(self, storage: Storage, pause_seconds: float) -> None:
        super().__init__("life sign")
        self._storage = storage
        self._pause_seconds = pause_seconds
        self._beaten = threading.Event()
        self._stopped = threading.Event()

    def beat(self) -> None:
        """Record that the fleet is managed."""
        self._beaten.set()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._beaten.set()

    def work(self) -> None:
        """Replace the sign while there are beats, until :meth:`stop`."""
        while self._beaten.wait() and not self._stopped.is_set():
            self._beaten.clear()
            try:
                self._storage.put(LIFE_SIGN, str(time.time_ns()).encode())
            except StorageUnavailable as error:
                log.warning("sign of life: %s", error)
            self._stopped.wait(self._pause_seconds)


def read_life_sign(storage: Storage) -> bytes | None:
    """Return the present sign; None if there is none or the storage is unavailable."""
    try:
        return storage.get(LIFE_SIGN)
    except (NotFound, StorageUnavailable) as error:
        log.warning("sign of life: %s", error)
        return None


class Silence:
    """Time since the last new sign, or since the start of this process; ``now`` in seconds."""

    def __init__(self, now: float) -> None:
        self._sign: bytes | None = None
        self._since = now

    def seconds(self, sign: bytes | None, now: float) -> float:
        """Return the seconds of silence, after a look at the present sign."""
        if sign is not None and sign != self._sign:
            self._sign, self._since = sign, now
        return now - self._since
