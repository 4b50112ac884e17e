"""Bounded caches for shards: object storage → this machine's disk → memory."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from vcasgd.data.formats import Samples, read_shard
from vcasgd.data.index import DataShard
from vcasgd.errors import DataError, NotFound
from vcasgd.storage.objects import Storage

log = logging.getLogger(__name__)

#: Shards that are prefetched concurrently; a single fetcher leaves the network idle between two.
FETCHERS = 2


@dataclass
class CacheCounts:
    """Counters of shard reads by result, and the seconds that reads waited."""

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    downloads: int = 0
    downloaded_bytes: int = 0
    stall_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of reads that did not wait for object storage; 1 without any reads."""
        reads = self.memory_hits + self.disk_hits + self.misses
        return 1 - self.misses / reads if reads else 1.0

    def to_dict(self) -> dict[str, float]:
        """Return all counters and the hit rate."""
        return {**asdict(self), "hit_rate": self.hit_rate}


class DiskCache:
    """Folder of files named by digest, shared by processes. Least recently used files go first."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, shard: DataShard) -> bool:
        """Return True if the shard is on disk, possibly damaged."""
        return (self._folder / shard.sha256).exists()

    def get(self, shard: DataShard) -> bytes | None:
        """Return the content of a shard, or None if it is missing or damaged."""
        path = self._folder / shard.sha256
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() == shard.sha256:
            return data
        log.warning("shard %s is damaged on disk: %s", shard.name, path)
        path.unlink(missing_ok=True)
        return None

    def put(self, shard: DataShard, data: bytes) -> None:
        """Store a shard, replacing older ones. Raises :class:`OSError` if the disk is full."""
        self._make_room(len(data))
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            try:
                file.write(data)
                file.flush()
                Path(file.name).rename(self._folder / shard.sha256)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _make_room(self, size_bytes: int) -> None:
        files = []
        for path in self._folder.iterdir():
            # Other processes remove files, too.
            try:
                files.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:
                continue
        total = sum(size for _, size, _ in files) + size_bytes
        for _, size, path in sorted(files):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size


class ShardCache:
    """Memory cache of decoded shards above an optional disk cache, for one reading thread.

    Reads raise :class:`DataError` for a missing or damaged shard, and
    :class:`~vcasgd.errors.StorageUnavailable`.
    """

    def __init__(self, storage: Storage, disk: DiskCache | None, memory_bytes: int) -> None:
        self._storage = storage
        self._disk = disk
        self._limit = memory_bytes
        self._memory: OrderedDict[str, Samples] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        self._fetches: dict[str, Future[bytes]] = {}
        self._fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="shards")
        self.counts = CacheCounts()

    def get(self, shard: DataShard) -> Samples:
        """Return the samples of a shard, and fetch it if necessary."""
        cached = self._memory.get(shard.sha256)
        if cached is not None:
            self._memory.move_to_end(shard.sha256)
            self.counts.memory_hits += 1
            return cached
        started = time.monotonic()
        try:
            samples = read_shard(shard.name, self._bytes(shard))
        finally:
            self.counts.stall_seconds += time.monotonic() - started
        self._check(shard, samples)
        self._keep(shard, samples)
        return samples

    def prefetch(self, shards: Iterable[DataShard]) -> None:
        """Start to fetch shards to disk, in this order. Does nothing without a disk cache."""
        if self._disk is None:
            return
        for shard in shards:
            # A fetch ends after its file is on disk, so the fetches come first.
            if (
                self._fetch_of(shard) is None
                and shard.sha256 not in self._memory
                and not self._disk.has(shard)
            ):
                with self._lock:
                    self._fetches[shard.sha256] = self._fetchers.submit(self._fetch_now, shard)

    def close(self) -> None:
        """Cancel pending fetches."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    # -- bytes -----------------------------------------------------------------------------------

    def _bytes(self, shard: DataShard) -> bytes:
        # Looked up before the disk: a fetch that ends in between has the content, too.
        fetch = self._fetch_of(shard)
        data = self._disk.get(shard) if self._disk else None
        if data is not None:
            self.counts.disk_hits += 1
            return data
        self.counts.misses += 1
        # A fetch that has not started is queued behind shards that are needed later.
        return self._fetch_now(shard) if fetch is None or fetch.cancel() else fetch.result()

    def _fetch_of(self, shard: DataShard) -> Future[bytes] | None:
        """Return the fetch of a shard that is queued or running. Only the reader starts one."""
        with self._lock:
            return self._fetches.get(shard.sha256)

    def _fetch_now(self, shard: DataShard) -> bytes:
        try:
            data = self._download(shard)
            if self._disk:
                self._store(self._disk, shard, data)
            return data
        finally:
            with self._lock:
                self._fetches.pop(shard.sha256, None)

    def _store(self, disk: DiskCache, shard: DataShard, data: bytes) -> None:
        try:
            disk.put(shard, data)
        except OSError as error:
            # Training continues without the disk, only more slowly.
            log.warning("shard %s can't be cached on disk: %s", shard.name, error)

    def _download(self, shard: DataShard) -> bytes:
        """Download a shard, and retry once if it is damaged."""
        for _ in range(2):
            try:
                data = self._storage.get(shard.name)
            except NotFound as error:
                raise DataError(f"shard {shard.name} is not in {self._storage.url}") from error
            with self._lock:
                self.counts.downloads += 1
                self.counts.downloaded_bytes += len(data)
            if hashlib.sha256(data).hexdigest() == shard.sha256:
                return data
            log.warning("download of shard %s is damaged", shard.name)
        raise DataError(
            f"shard {shard.name} of {self._storage.url} is damaged: the digests of two "
            "downloads differ from the index",
            remedy=f"restore the file, or run vcasgd data index {self._storage.url}",
        )

    # -- memory ----------------------------------------------------------------------------------

    def _check(self, shard: DataShard, samples: Samples) -> None:
        if len(samples) != shard.samples:
            raise DataError(
                f"shard {shard.name} has {len(samples)} samples, and {shard.samples} in the index",
                remedy=f"run vcasgd data index {self._storage.url}",
            )

    def _keep(self, shard: DataShard, samples: Samples) -> None:
        self._memory[shard.sha256] = samples
        self._size += samples.nbytes
        while self._size > self._limit and len(self._memory) > 1:
            _, gone = self._memory.popitem(last=False)
            self._size -= gone.nbytes
