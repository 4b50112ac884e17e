"""The part of checkpointing that needs tensors: read a pinned model, and write its file."""

from __future__ import annotations

from collections.abc import Sequence

from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import Cut
from vcasgd.storage.checkpoints import StoredCheckpoint
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.store.tensors.sharded import ShardedSnapshots
from vcasgd.store.tensors.snapshot_index import ModelSnapshot, versions_of


def write_pinned(
    nodes: Sequence[RedisClient], storage: Storage, job: str, facts: ModelFacts, pin: str
) -> tuple[StoredCheckpoint, ModelSnapshot | None]:
    """Return the checkpoint of the model pinned under a name, and its snapshots if it is new.

    Raises :class:`~vcasgd.errors.SnapshotMissing` and
    :class:`~vcasgd.errors.StorageUnavailable`.
    """
    layout = Layout.from_json(facts.layout)
    cut = Cut(layout.floats, layout.parameters, facts.shards)
    snapshots = ShardedSnapshots(nodes, job, cut)
    checkpoints = ModelCheckpoints(storage, job)
    whole, floats = snapshots.fetch_pinned(pin)
    present = checkpoints.find(versions_of(whole))
    if present is not None:
        return present, None
    state = snapshots.fetch_states(whole)
    return checkpoints.write(whole, layout, floats, state, facts.adapter), whole
