"""Data sets in shards: files in one folder or bucket, named by an index, read when needed."""

from __future__ import annotations

from vcasgd.data.dataset import ShardedDataset
from vcasgd.data.index import DataShard, ShardIndex, make_index

__all__ = ["DataShard", "ShardIndex", "ShardedDataset", "make_index"]
