"""The index of a sharded data set: which shards, how many samples in each, and their digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from vcasgd.data.formats import SUFFIXES, read_shard
from vcasgd.errors import DataError, NotFound
from vcasgd.storage.objects import Storage

#: of the index, in the folder of the shards
NAME = "index.json"
FORMAT = "vcasgd-data/1"


@dataclass(frozen=True)
class DataShard:
    """One file: its name in the folder, and what must be in it."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """The shards of a data set, in the order of its samples."""

    shards: tuple[DataShard, ...]

    def to_json(self) -> str:
        shards = [asdict(shard) for shard in self.shards]
        return json.dumps({"format": FORMAT, "shards": shards}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> ShardIndex:
        """Raises :class:`DataError` that names what is wrong."""
        try:
            value = json.loads(text)
            if value["format"] != FORMAT:
                raise ValueError(f"its format is {value['format']!r}, not {FORMAT}")
            shards = tuple(_shard(each) for each in value["shards"])
            if not shards:
                raise ValueError("it names no shards")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: is not an index of shards: {error}",
                remedy="make it with: vcasgd data index",
            ) from error
        return cls(shards)

    @classmethod
    def load(cls, storage: Storage) -> ShardIndex:
        """From the folder of the shards. Raises :class:`DataError`,
        :class:`~vcasgd.errors.StorageUnavailable`."""
        try:
            text = storage.get(NAME)
        except NotFound as error:
            raise DataError(
                f"{storage.url}: has no {NAME}", remedy=f"vcasgd data index {storage.url}"
            ) from error
        return cls.from_json(text, f"{storage.url}/{NAME}")


def make_index(storage: Storage, say: Callable[[DataShard], None] = lambda _: None) -> ShardIndex:
    """Reads every shard of a folder, in the order of their names, and writes the index there.

    Raises :class:`DataError` for a shard that can't be read, or where there is none.
    """
    names = sorted(name for name in storage.names("") if name.endswith(SUFFIXES))
    if not names:
        raise DataError(
            f"{storage.url}: has no shards", remedy=f"their names end in {', '.join(SUFFIXES)}"
        )
    shards = []
    for name in names:
        data = storage.get(name)
        samples = len(read_shard(name, data))
        shards.append(DataShard(name, samples, len(data), hashlib.sha256(data).hexdigest()))
        say(shards[-1])
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
        raise ValueError(f"{shard.name!r} ends in none of {', '.join(SUFFIXES)}")
    if type(shard.sha256) is not str or len(shard.sha256) != 64 or not shard.sha256.isalnum():
        raise ValueError(f"sha256 of {shard.name!r} is no digest")
    return shard
