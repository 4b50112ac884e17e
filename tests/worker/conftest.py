"""Jobs in one shard and in two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shard_pair import ShardPair, pair_of
from support.waiting import PATIENCE

from vcasgd.worker import exchange
from vcasgd.worker.exchange import LATE_SECONDS


@pytest.fixture(autouse=True)
def no_node_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may be slow here; a worker leaves out the part of one that is late."""
    monkeypatch.setattr(exchange, "LATE_SECONDS", PATIENCE)


@pytest.fixture
def nodes_can_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LATE_SECONDS", LATE_SECONDS)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[ShardPair]:
    with pair_of(tmp_path) as pair:
        yield pair


@pytest.fixture
def single(tmp_path: Path) -> Iterator[ShardPair]:
    """A job in one shard."""
    with pair_of(tmp_path, shards=1) as single:
        yield single
