"""Sharded data sets: files in a folder or bucket, listed in an index and read on demand."""

from __future__ import annotations

from vcasgd.data.dataset import ShardedDataset
from vcasgd.data.shards import DataShard, ShardIndex, make_index

__all__ = ["DataShard", "ShardIndex", "ShardedDataset", "make_index"]
