"""Map-style data set whose samples come from shards, which it caches.

Caches are bounded: object storage → this machine's disk → memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vcasgd.data.shards import DataShard, Sample, Samples, ShardIndex, read_shard
from vcasgd.errors import DataError, NotFound, SpecError
from vcasgd.learning.subtasks import SampleBlocks
from vcasgd.local_files import default_cache_folder
from vcasgd.settings import load_settings
from vcasgd.storage.objects import Storage

log = logging.getLogger(__name__)

#: Shards that are prefetched concurrently; a single fetcher leaves the network idle between two.
FETCHERS = 2
#: Shards by where they were read, downloads, and the seconds that reads waited.
COUNTERS = (
    *("memory_hits", "disk_hits", "misses"),
    *("downloads", "downloaded_bytes", "stall_seconds"),
)


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
        """Store a shard, replacing older ones. Training continues if the disk is full."""
        try:
            self._make_room(len(data))
            part = self._folder / f"{shard.sha256}.{uuid4().hex}"
            try:
                part.write_bytes(data)
                part.rename(self._folder / shard.sha256)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            log.warning("shard %s can't be cached on disk: %s", shard.name, error)

    def _make_room(self, size_bytes: int) -> None:
        files = []
        # Those that a killed process was writing, too.
        for path in self._folder.glob("?" * 64 + "*"):
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
        #: Fetches that are queued or running. Only the reader starts one.
        self._fetches: dict[str, Future[bytes]] = {}
        self._fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="shards")
        #: Values of :data:`COUNTERS`.
        self.counts: defaultdict[str, float] = defaultdict(float)

    def get(self, shard: DataShard) -> Samples:
        """Return the samples of a shard, and fetch it if necessary."""
        cached = self._memory.get(shard.sha256)
        if cached is not None:
            self._memory.move_to_end(shard.sha256)
            self.counts["memory_hits"] += 1
            return cached
        started = time.monotonic()
        try:
            samples = read_shard(shard.name, self._bytes(shard))
        finally:
            self.counts["stall_seconds"] += time.monotonic() - started
        if len(samples) != shard.samples:
            raise DataError(
                f"shard {shard.name} has {len(samples)} samples, and {shard.samples} in the index",
                remedy=f"run vcasgd data index {self._storage.url}",
            )
        self._memory[shard.sha256] = samples
        self._size += samples.nbytes
        while self._size > self._limit and len(self._memory) > 1:
            self._size -= self._memory.popitem(last=False)[1].nbytes
        return samples

    def prefetch(self, shards: Iterable[DataShard]) -> None:
        """Start to fetch shards to disk, in this order. Does nothing without a disk cache."""
        for shard in shards if self._disk else ():
            with self._lock:
                # A fetch ends after its file is on disk, so the fetches come first.
                if not (
                    shard.sha256 in self._fetches
                    or shard.sha256 in self._memory
                    or (self._disk and self._disk.has(shard))
                ):
                    self._fetches[shard.sha256] = self._fetchers.submit(self._fetch, shard)

    def close(self) -> None:
        """Cancel pending fetches."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def _bytes(self, shard: DataShard) -> bytes:
        # Looked up before the disk: a fetch that ends in between has the content, too.
        with self._lock:
            fetch = self._fetches.get(shard.sha256)
        data = self._disk.get(shard) if self._disk else None
        if data is not None:
            self.counts["disk_hits"] += 1
            return data
        self.counts["misses"] += 1
        # A fetch that has not started is queued behind shards that are needed later.
        return self._fetch(shard) if fetch is None or fetch.cancel() else fetch.result()

    def _fetch(self, shard: DataShard) -> bytes:
        try:
            data = self._download(shard)
            if self._disk:
                self._disk.put(shard, data)
            return data
        finally:
            with self._lock:
                self._fetches.pop(shard.sha256, None)

    def _download(self, shard: DataShard) -> bytes:
        """Download a shard, and retry once if it is damaged."""
        for _ in range(2):
            try:
                data = self._storage.get(shard.name)
            except NotFound as error:
                raise DataError(f"shard {shard.name} is not in {self._storage.url}") from error
            with self._lock:
                self.counts["downloads"] += 1
                self.counts["downloaded_bytes"] += len(data)
            if hashlib.sha256(data).hexdigest() == shard.sha256:
                return data
            log.warning("download of shard %s is damaged", shard.name)
        raise DataError(
            f"shard {shard.name} of {self._storage.url} is damaged: the digests of two "
            "downloads differ from the index",
            remedy=f"restore the file, or run vcasgd data index {self._storage.url}",
        )


#: Default size of the decoded shards in memory.
MEMORY_BYTES = 1 << 30
#: Default size of the files on disk.
DISK_BYTES = 10 << 30
#: Shards whose samples are mixed. More shards mix better but need more memory.
WINDOW = 4


class ShardedDataset(Dataset[Any]):
    """Data set of all samples in a folder or bucket with an index (``vcasgd data index``).

    A sample is a dict. For npz and safetensors files it has a row of each array, and for tar files
    the members with one name, and the name as ``"__key__"``. ``transform`` converts it for the
    task.

    The cache holds up to ``memory_bytes`` of decoded shards. Unless ``location`` is a folder on
    this machine, it also holds up to ``disk_bytes`` of files on disk, shared by the machine's
    workers. Epochs follow :class:`~vcasgd.learning.subtasks.SampleBlocks`, so a worker reads few
    shards at a time. While it trains, it fetches the shards of its lease and of its probable next
    lease.

    Raises :class:`SpecError` for an invalid location, :class:`DataError` for a missing or damaged
    index or shard, and :class:`~vcasgd.errors.StorageUnavailable`.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        transform: Callable[[Sample], Any] | None = None,
        window: int = WINDOW,
        memory_bytes: int = MEMORY_BYTES,
        disk_bytes: int = DISK_BYTES,
        cache_dir: Path | None = None,
    ) -> None:
        storage = storage_at(location)
        self.index = ShardIndex.load(storage)
        sizes = tuple(shard.samples for shard in self.index.shards)
        #: Blocks that determine the order of an epoch.
        self.blocks = SampleBlocks(sizes, window)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._transform = transform
        is_local = storage.url.startswith("file:")
        disk = None if is_local else DiskCache(cache_dir or _default_cache(), disk_bytes)
        self._cache = ShardCache(storage, disk, memory_bytes)

    @property
    def content_digest(self) -> str:
        """The SHA-256 of the index, which has those of all shards: machines compare it."""
        return hashlib.sha256(self.index.model_dump_json().encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples in the order of ``indices``."""
        return self.convert(self.read(indices))

    def read(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples before the ``transform``. Each shard is looked up once.

        A task's loader processes only convert them, because the connections and the cache belong
        to this process.
        """
        positions = np.asarray(indices, dtype=np.int64)
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"an index is not between 0 and {len(self) - 1}")
        shards = self._shards_of(positions)
        result: list[Any] = [None] * len(positions)
        for shard in np.unique(shards):
            samples = self._cache.get(self.index.shards[shard])
            for place in np.flatnonzero(shards == shard):
                result[place] = samples[int(positions[place] - self._starts[shard])]
        return result

    def convert(self, samples: list[Sample]) -> list[Any]:
        """Return the samples after the ``transform``."""
        return [self._transform(sample) for sample in samples] if self._transform else samples

    def will_read(self, indices: NDArray[np.int64]) -> None:
        """Start to fetch the shards of ``indices``, in this order."""
        shards = self._shards_of(indices)
        _, first = np.unique(shards, return_index=True)
        self._cache.prefetch(self.index.shards[shards[place]] for place in np.sort(first))

    def read_counters(self) -> dict[str, float]:
        """Return the counters of the cache; see :attr:`~vcasgd.data.dataset.ShardCache.counts`.

        ``hit_rate`` is the share of reads that did not wait for object storage.
        """
        counts = dict.fromkeys(COUNTERS, 0.0) | self._cache.counts
        reads = counts["memory_hits"] + counts["disk_hits"] + counts["misses"]
        return {**counts, "hit_rate": 1 - counts["misses"] / reads if reads else 1.0}

    def close(self) -> None:
        """Cancel pending fetches."""
        self._cache.close()

    def _shards_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, indices, side="right") - 1


def storage_at(location: str | Path) -> Storage:
    """Open a folder (a path or ``file://``) or a prefix (``s3://`` or ``gs://``).

    Raises :class:`SpecError` for anything else, and :class:`DataError` if the folder is missing.
    """
    text = str(location)
    scheme, separator, _ = text.partition("://")
    if separator and scheme not in ("file", "s3", "gs"):
        raise SpecError(f"data: {text} is not a folder, s3://…, or gs://…", field="data")
    if separator and scheme != "file":
        return Storage(text.rstrip("/"))
    folder = Path(text.removeprefix("file://")).expanduser().resolve()
    if not folder.is_dir():
        raise DataError(f"data: folder {folder} does not exist on this machine")
    return Storage(folder.as_uri())


def _default_cache() -> Path:
    code = load_settings().cache_dir
    return code / "data" if code else default_cache_folder("data")
