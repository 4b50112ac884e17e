"""Index of a sharded data set: its shards with their numbers of samples and digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from vcasgd.data.formats import SUFFIXES, read_shard
from vcasgd.errors import DataError, NotFound
from vcasgd.storage.objects import Storage

#: File name of the index, in the folder of the shards.
NAME = "index.json"
FORMAT = "vcasgd-data/1"


@dataclass(frozen=True)
class DataShard:
    """One file: its name in the folder, and the expected size and SHA-256."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """Shards of a data set, in the order of its samples."""

    shards: tuple[DataShard, ...]

    def to_json(self) -> str:
        """Return the content of the index file."""
        shards = [asdict(shard) for shard in self.shards]
        return json.dumps({"format": FORMAT, "shards": shards}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> ShardIndex:
        """Parse an index file. Raises :class:`DataError` that starts with ``where``."""
        try:
            value = json.loads(text)
            if value["format"] != FORMAT:
                raise ValueError(f"its format is {value['format']!r}, not {FORMAT}")
            shards = tuple(_shard(each) for each in value["shards"])
            if not shards:
                raise ValueError("it lists no shards")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: is not a valid index of shards: {error}",
                remedy="create it with: vcasgd data index",
            ) from error
        return cls(shards)

    @classmethod
    def load(cls, storage: Storage) -> ShardIndex:
        """Load the index from the folder of the shards.

        Raises :class:`DataError` and :class:`~vcasgd.errors.StorageUnavailable`.
        """
        try:
            text = storage.get(NAME)
        except NotFound as error:
            raise DataError(
                f"{storage.url}: has no {NAME}", remedy=f"run vcasgd data index {storage.url}"
            ) from error
        return cls.from_json(text, f"{storage.url}/{NAME}")


def make_index(
    storage: Storage, on_shard: Callable[[DataShard], None] = lambda _: None
) -> ShardIndex:
    """Read every shard of a folder, in the order of their names, and write the index.

    Calls ``on_shard`` after each shard. Raises :class:`DataError` if a shard can't be read, or the
    folder has none.
    """
    names = sorted(name for name in storage.names("") if name.endswith(SUFFIXES))
    if not names:
        raise DataError(
            f"{storage.url}: has no shards", remedy=f"names of shards end in {', '.join(SUFFIXES)}"
        )
    shards = []
    for name in names:
        data = storage.get(name)
        samples = len(read_shard(name, data))
        shards.append(DataShard(name, samples, len(data), hashlib.sha256(data).hexdigest()))
        on_shard(shards[-1])
    index = ShardIndex(tuple(shards))
    storage.put(NAME, index.to_json().encode())
    return index


def _shard(value: dict[str, Any]) -> DataShard:
    shard = DataShard(**value)
    for field in ("samples", "bytes"):
        number = getattr(shard, field)
        if type(number) is not int or number < 0:
            raise ValueError(f"{field} of {shard.name!r} is {number!r}")
    if not str(shard.name).endswith(SUFFIXES):
        raise ValueError(f"{shard.name!r} does not end in any of {', '.join(SUFFIXES)}")
    if type(shard.sha256) is not str or len(shard.sha256) != 64 or not shard.sha256.isalnum():
        raise ValueError(f"sha256 of {shard.name!r} is not a SHA-256 digest")
    return shard
