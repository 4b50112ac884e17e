"""Fixtures of the store's tests."""

from __future__ import annotations

import pytest
from support.snapshots import KEYS

from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.snapshot_store import SnapshotStore


@pytest.fixture
def snapshots(tensors: RedisClient) -> SnapshotStore:
    return SnapshotStore(tensors, KEYS)
