"""Snapshots of a small vector."""

from __future__ import annotations

import torch
from torch import Tensor

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot import (
    Change,
    Meta,
    Record,
    Snapshot,
)
from vcasgd.store.tensors.snapshot_store import SnapshotStore

KEYS = TensorKeys("job")


def meta_of(vector: Tensor, version: int, token: int) -> Meta:
    return Meta(version, token, vector.numel(), vector.numel(), "layout")


def publish(
    snapshots: SnapshotStore,
    vector: Tensor,
    version: int,
    token: int = 1,
    previous: Meta | None = None,
    positions: dict[int, int] | None = None,
) -> Meta:
    """Publish a version, as the parameter server does after each batch."""
    meta = meta_of(vector, version, token)
    replaced = snapshots.chunk_keys(previous) if previous else []
    snapshots.write(meta, vector, base=version - 1, instead_of=replaced)
    text = {str(subtask): at for subtask, at in (positions or {}).items()}
    fields = {"version": version, "token": token, "finished": 0, **text}
    change = Change(base=version - 1, fields=fields)
    snapshots.commit(token, meta, change)
    return meta


def constant(value: float, size: int = 1000) -> Tensor:
    return torch.full((size,), float(value))


def install(snapshots: SnapshotStore, vector: Tensor | None = None, token: int = 1) -> Meta:
    vector = constant(0) if vector is None else vector
    meta = meta_of(vector, 0, token)
    assert snapshots.install(token, meta, Record(), vector)
    return meta


def values(vector: Tensor) -> list[float]:
    return sorted(set(vector.tolist()))


def fetch(snapshots: SnapshotStore, size: int = 1000) -> tuple[Snapshot, Tensor]:
    out = torch.empty(size)
    return snapshots.fetch(out), out


def key_names(tensors: RedisClient) -> set[str]:
    return {key.decode().removeprefix(KEYS.prefix) for key in tensors.keys("*")}
