"""Pinned snapshots, and the removal of what is no longer needed."""

from __future__ import annotations

import pytest
from support.snapshots import KEYS, constant, fetch, install, key_names, meta_of, publish, values

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot import (
    Record,
)
from vcasgd.store.tensors.snapshot_store import SnapshotStore

pytestmark = pytest.mark.both_servers


class TestForget:
    def test_leaves_nothing_of_the_job_and_everything_of_others(
        self, snapshots: SnapshotStore, tensors: RedisClient
    ) -> None:
        others = SnapshotStore(tensors, TensorKeys("job-2"))
        assert others.install(1, meta_of(constant(1), 0, 1), Record(), constant(1))
        before = key_names(tensors)
        install(snapshots)
        publish(snapshots, constant(1), 1)
        snapshots.request_pin("a")
        snapshots.pin(1, ["b"], snapshots.read())
        tensors.set(KEYS.payload_chunk("u", 0), b"left behind")
        tensors.xadd(KEYS.stream, {"h": "x"})

        assert snapshots.delete_all() == 10

        assert key_names(tensors) == before
        assert snapshots.delete_all() == 0

    def test_orphans_are_chunks_that_no_snapshot_uses(
        self, snapshots: SnapshotStore, tensors: RedisClient
    ) -> None:
        install(snapshots)
        snapshots.pin(1, ["a"], snapshots.read())
        present = publish(snapshots, constant(1), 1)
        # a server died in the middle of a publication
        snapshots.write(meta_of(constant(2), 2, 1), constant(2))
        tensors.set(KEYS.payload_chunk("u", 0), b"waits to be applied")
        pinned = [pin.meta for pin in snapshots.pins().values()]

        assert snapshots.delete_orphans(1, [present, *pinned]) == 1

        assert {"s:0.1:0", "s:1.1:0", "u:u:0"} <= key_names(tensors)
        assert values(fetch(snapshots)[1]) == [1.0]
