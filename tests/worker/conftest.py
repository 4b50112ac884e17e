"""Jobs in one shard and in two."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.harness import RedisServer
from support.shard_pair import MakePair, ShardPair, pair_of, running_stores
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


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with running_stores(tmp_path_factory.mktemp("stores")) as stores:
        yield stores


@pytest.fixture
def make_pair(stores: list[RedisServer], tmp_path: Path) -> MakePair:
    """Return a function that runs a job: ``with make_pair(shards=1, samples=30) as job``."""
    return partial(pair_of, stores, tmp_path)


@pytest.fixture
def pair(make_pair: MakePair) -> Iterator[ShardPair]:
    with make_pair() as pair:
        yield pair


@pytest.fixture
def single(make_pair: MakePair) -> Iterator[ShardPair]:
    """A job in one shard."""
    with make_pair(shards=1) as single:
        yield single
