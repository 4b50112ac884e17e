"""Jobs in one shard and in two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shard_pair import ShardPair, pair_of


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[ShardPair]:
    with pair_of(tmp_path) as pair:
        yield pair


@pytest.fixture
def single(tmp_path: Path) -> Iterator[ShardPair]:
    """A job in one shard."""
    with pair_of(tmp_path, shards=1) as single:
        yield single
