"""Shards: their file formats, and the index of a folder with their sizes and digests."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from vcasgd.errors import DataError, NotFound
from vcasgd.spec.problems import first_mistake
from vcasgd.spec.values import StrictModel
from vcasgd.storage.objects import Storage

Sample = dict[str, Any]

#: Decoders for webdataset's usual extensions; other members stay bytes.
_MEMBERS: dict[str, Callable[[bytes], Any]] = {
    "cls": lambda data: int(data),
    "txt": lambda data: data.decode(),
    "json": json.loads,
    "npy": lambda data: torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False)),
}


class Arrays(Sequence[Sample]):
    """Tensors of equal length; sample ``i`` is the ``i``-th row of each."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        lengths = {name: len(column) if column.ndim else -1 for name, column in columns.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise ValueError(f"its arrays have different lengths: {lengths}")
        self._columns = columns
        self._length = next(iter(lengths.values()))
        self.nbytes = sum(column.nbytes for column in columns.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return {name: column[index] for name, column in self._columns.items()}


class Members(Sequence[Sample]):
    """Members of the tar ``name`` as bytes, decoded when a sample is read."""

    def __init__(self, name: str, samples: list[dict[str, bytes]], keys: list[str]) -> None:
        self._name = name
        self._samples = samples
        self._keys = keys
        self.nbytes = sum(len(data) for sample in samples for data in sample.values())

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        sample: Sample = {"__key__": self._keys[index]}
        for kind, data in self._samples[index].items():
            try:
                sample[kind] = _MEMBERS.get(kind, bytes)(data)
            except _UNREADABLE as error:
                # Of this sample only, so that a job can skip it.
                where = f"shard {self._name}: {self._keys[index]}.{kind}"
                raise ValueError(f"{where} can't be decoded: {error}") from error
        return sample


_UNREADABLE = (
    *(OSError, ValueError, KeyError, EOFError),
    *(SafetensorError, tarfile.TarError, zipfile.BadZipFile, zlib.error),
)
#: Content of a shard; ``nbytes`` is its size in memory.
Samples = Arrays | Members


def read_shard(name: str, data: bytes) -> Samples:
    """Decode the samples of a file. Raises :class:`DataError` with the name of the file."""
    read = next(read for suffix, read in _READERS.items() if name.endswith(suffix))
    try:
        return read(name, data)
    except _UNREADABLE as error:
        raise DataError(f"shard {name}: can't be read: {error}") from error


def _read_npz(_: str, data: bytes) -> Samples:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return Arrays({name: torch.from_numpy(arrays[name]) for name in arrays.files})


def _read_tar(name: str, data: bytes) -> Samples:
    """Read a tar: consecutive members with equal names up to the first dot form one sample."""
    samples: list[dict[str, bytes]] = []
    keys: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            folder, slash, base = member.name.rpartition("/")
            stem, dot, extension = base.partition(".")
            if file is None or not dot:
                continue
            key = f"{folder}{slash}{stem}"
            if not keys or keys[-1] != key:
                keys.append(key)
                samples.append({})
            samples[-1][extension.lower()] = file.read()
    return Members(name, samples, keys)


_READERS: dict[str, Callable[[str, bytes], Samples]] = {
    ".npz": _read_npz,
    ".safetensors": lambda _, data: Arrays(load_safetensors(data)),
    ".tar": _read_tar,
}
#: File name suffixes of shards.
SUFFIXES = tuple(_READERS)


#: File name of the index, in the folder of the shards.
INDEX = "index.json"


class DataShard(StrictModel):
    """One file: its name in the folder, and the expected size and SHA-256."""

    name: str = Field(pattern=r"\.(npz|safetensors|tar)$")
    samples: int = Field(ge=0, strict=True)
    bytes: int = Field(ge=0, strict=True)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ShardIndex(StrictModel):
    """Shards of a data set, in the order of its samples."""

    format: Literal["vcasgd-data/1"] = "vcasgd-data/1"
    shards: tuple[DataShard, ...] = Field(min_length=1)

    @classmethod
    def load(cls, storage: Storage) -> ShardIndex:
        """Load the index from the folder of the shards.

        Raises :class:`DataError` and :class:`~vcasgd.errors.StorageUnavailable`.
        """
        remedy = f"run vcasgd data index {storage.url}"
        try:
            return cls.model_validate_json(storage.get(INDEX))
        except NotFound as error:
            raise DataError(f"{storage.url}: has no {INDEX}", remedy=remedy) from error
        except ValidationError as error:
            why = first_mistake(error, "the file")
            raise DataError(f"{storage.url}/{INDEX}: {why}", remedy=remedy) from error


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
        digest, samples = hashlib.sha256(data).hexdigest(), len(read_shard(name, data))
        shards.append(DataShard(name=name, samples=samples, bytes=len(data), sha256=digest))
        on_shard(shards[-1])
    index = ShardIndex(shards=tuple(shards))
    storage.put(INDEX, index.model_dump_json(indent=1).encode())
    return index
