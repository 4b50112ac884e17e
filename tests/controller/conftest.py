"""A real ledger, empty at the start of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.harness import RedisServer

from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs


@pytest.fixture(scope="package")
def ledger_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("ledger"), durable=False)
    yield server
    server.end()


@pytest.fixture
def ledger(ledger_server: RedisServer) -> RedisClient:
    ledger_server.connection.flushall()
    return ledger_server.connection


@pytest.fixture
def jobs(ledger: RedisClient) -> Jobs:
    return Jobs(ledger)
