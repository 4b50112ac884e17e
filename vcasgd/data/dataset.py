"""``ShardedDataset``: a map-style data set whose samples come from shards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vcasgd.data.cache import DiskCache, ShardCache
from vcasgd.data.formats import Sample
from vcasgd.data.index import ShardIndex
from vcasgd.errors import DataError, SpecError
from vcasgd.learning.subtasks import SampleBlocks
from vcasgd.settings import load_settings
from vcasgd.storage.objects import Storage

MEMORY_BYTES = 1 << 30
DISK_BYTES = 10 << 30
#: shards whose samples are mixed: more mix better, and more have to be in memory
WINDOW = 4


class ShardedDataset(Dataset[Any]):
    """The samples of all shards in a folder or bucket with an index (``vcasgd data index``).

    A sample is a dict: of an npz or safetensors file a row of each array, of a tar the members of
    one name, with ``"__key__"``. ``transform`` makes of it what the task wants.

    Shards are kept decoded in ``memory_bytes``, and as files in ``disk_bytes`` of this machine's
    disk, which its workers share, unless ``location`` is a folder of this machine itself. Epochs
    are in the order of :class:`~vcasgd.learning.subtasks.SampleBlocks`, so a worker reads few
    shards at a
    time; those of its lease are fetched while it trains, and those of the one that it will
    probably have next.

    Raises :class:`SpecError` for a wrong location, :class:`DataError` for a missing
    or damaged index or shard, and :class:`~vcasgd.errors.StorageUnavailable`.
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
        #: the order of an epoch follows them
        self.blocks = SampleBlocks(sizes, window)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._transform = transform
        here = storage.url.startswith("file:")
        disk = None if here else DiskCache(cache_dir or _default_cache(), disk_bytes)
        self._cache = ShardCache(storage, disk, memory_bytes)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples in the order of ``indices``; each shard is looked up once."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"there are {len(self)} samples, from 0 on")
        shards = self._shards_of(wanted)
        found: list[Any] = [None] * len(wanted)
        for shard in np.unique(shards):
            samples = self._cache.get(self.index.shards[shard])
            for place in np.flatnonzero(shards == shard):
                sample = samples[int(wanted[place] - self._starts[shard])]
                found[place] = self._transform(sample) if self._transform else sample
        return found

    def will_read(self, indices: NDArray[np.int64]) -> None:
        """Begins to fetch what a worker is going to read, in this order."""
        shards = self._shards_of(indices)
        _, first = np.unique(shards, return_index=True)
        self._cache.prefetch(self.index.shards[shards[place]] for place in np.sort(first))

    def counts(self) -> dict[str, float]:
        """Reads of shards: hits, misses, bytes, and the seconds that were waited for them."""
        return self._cache.counts.to_dict()

    def close(self) -> None:
        """Ends what is being fetched."""
        self._cache.close()

    def _shards_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, indices, side="right") - 1


def storage_at(location: str | Path) -> Storage:
    """A folder by path or ``file://``, or a prefix by ``s3://`` or ``gs://``.

    Raises :class:`SpecError` for anything else, :class:`DataError` where there is no such folder.
    """
    text = str(location)
    scheme, separator, _ = text.partition("://")
    if separator and scheme not in ("file", "s3", "gs"):
        raise SpecError(
            f"data: {text} is no folder, nor of the form s3://… or gs://…", field="data"
        )
    if separator and scheme != "file":
        return Storage(text.rstrip("/"))
    folder = Path(text.removeprefix("file://")).expanduser().resolve()
    if not folder.is_dir():
        raise DataError(f"data: there is no folder {folder} on this machine")
    return Storage(folder.as_uri())


def _default_cache() -> Path:
    code = load_settings().cache_dir
    return code / "data" if code else Path(tempfile.gettempdir()) / f"vcasgd-data-{os.getuid()}"
