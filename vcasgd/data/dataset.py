"""Map-style data set whose samples come from shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vcasgd.data.cache import COUNTERS, DiskCache, ShardCache
from vcasgd.data.shards import Sample, ShardIndex
from vcasgd.errors import DataError, SpecError
from vcasgd.learning.subtasks import SampleBlocks
from vcasgd.local_files import default_cache_folder
from vcasgd.settings import load_settings
from vcasgd.storage.objects import Storage

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
        """Return the counters of the cache; see :attr:`~vcasgd.data.cache.ShardCache.counts`.

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
