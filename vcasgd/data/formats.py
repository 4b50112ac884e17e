"""Readers for the file formats of shards: arrays (npz, safetensors) and webdataset's tar."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from vcasgd.errors import DataError

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
    """Members of a tar as bytes, decoded when a sample is read."""

    def __init__(self, samples: list[dict[str, bytes]], keys: list[str]) -> None:
        self._samples = samples
        self._keys = keys
        self.nbytes = sum(len(data) for sample in samples for data in sample.values())

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        members = self._samples[index].items()
        decoded = {name: _MEMBERS.get(name, bytes)(data) for name, data in members}
        return {"__key__": self._keys[index], **decoded}


#: Content of a shard; ``nbytes`` is its size in memory.
Samples = Arrays | Members


def read_shard(name: str, data: bytes) -> Samples:
    """Decode the samples of a file. Raises :class:`DataError` with the name of the file."""
    read = next(read for suffix, read in _READERS.items() if name.endswith(suffix))
    try:
        return read(data)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise _unreadable(name, error) from error
    except (SafetensorError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(f"shard {name}: can't be read: {error}")


def _read_npz(data: bytes) -> Samples:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return Arrays({name: torch.from_numpy(arrays[name]) for name in arrays.files})


def _read_safetensors(data: bytes) -> Samples:
    return Arrays(load_safetensors(data))


def _read_tar(data: bytes) -> Samples:
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
    return Members(samples, keys)


_READERS: dict[str, Callable[[bytes], Samples]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".tar": _read_tar,
}
#: File name suffixes of shards.
SUFFIXES = tuple(_READERS)
