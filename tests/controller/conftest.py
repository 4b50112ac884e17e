"""A real ledger, empty at the start of each test, and controllers of clouds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.controllers import Controllers
from support.harness import RedisServer
from support.provider_backends import AwsBackend, GcpBackend
from support.two_clouds import TwoClouds

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


@pytest.fixture
def clouds(
    tmp_path: Path, ledger: RedisClient, ledger_server: RedisServer, aws: AwsBackend,
    gcp: GcpBackend,
) -> Iterator[TwoClouds]:  # fmt: skip
    assert ledger.dbsize() == 0
    yield TwoClouds(tmp_path, ledger_server, aws, gcp)
    aws.ec2.answers.set()


@pytest.fixture
def controllers(tmp_path: Path, ledger: RedisClient) -> Controllers:
    return Controllers(tmp_path, ledger)
