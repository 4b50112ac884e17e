"""One server process of each kind for all tests of the store, emptied for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.harness import RedisServer
from support.servers import KINDS, running_server, url_of
from support.world import World
from vcasgd.store.connection import RedisClient, connect


@pytest.fixture(scope="session", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    with running_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture(scope="session")
def clients(server: RedisServer) -> Iterator[tuple[RedisClient, RedisClient]]:
    pair = connect(url_of(server, 0)), connect(url_of(server, 1))
    yield pair
    for client in pair:
        client.close()


@pytest.fixture
def ledger(clients: tuple[RedisClient, RedisClient]) -> RedisClient:
    clients[0].flushall()
    return clients[0]


@pytest.fixture
def tensors(clients: tuple[RedisClient, RedisClient]) -> RedisClient:
    clients[1].flushall()
    return clients[1]


@pytest.fixture
def make_world(ledger: RedisClient, tensors: RedisClient, tmp_path: Path) -> Callable[..., World]:
    """``make_world(samples=12, epochs=2, …)``: a job that runs by default."""

    def make(**fields: Any) -> World:
        return World(ledger, tensors, tmp_path / "storage", **fields)

    return make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()
