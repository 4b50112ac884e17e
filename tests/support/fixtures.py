"""Fixtures that tests of several folders use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch

from support.api_harness import Api, running
from support.harness import HEARTBEAT, Harness, RedisServer
from support.provider_backends import AwsBackend, GcpBackend, aws_backend, gcp_backend
from support.servers import KINDS, running_server, url_of
from support.world import World
from vcasgd.client import Client
from vcasgd.store.connection import RedisClient, connect

# --- processes of the data path -------------------------------------------------------------------


@pytest.fixture
def harness(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A ledger and a tensors server, for the processes that a test starts. Logs go to the report.

    The parameter is the heartbeat in seconds. A lease lasts eight heartbeats, so only tests that
    wait for the end of a lease use a short one.
    """
    yield from _ended(Harness(tmp_path, heartbeat=getattr(request, "param", HEARTBEAT)))


@pytest.fixture
def sharded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Harness]:
    """``harness`` with three store nodes."""
    yield from _ended(Harness(tmp_path, heartbeat=getattr(request, "param", HEARTBEAT), nodes=3))


def _ended(harness: Harness) -> Iterator[Harness]:
    try:
        yield harness
    finally:
        harness.end()
        sys.stdout.write(harness.logs())


# --- one server of each kind for all tests of the store, emptied for each test --------------------


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


# --- an API that most tests share, and an own API for tests that break it -------------------------


@pytest.fixture(scope="session")
def shared_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running(tmp_path_factory.mktemp("api"), as_command=True) as api:
        yield api


@pytest.fixture
def api(shared_api: Api) -> Api:
    """Return the shared API with an empty ledger."""
    shared_api.connection.flushall()
    return shared_api


@pytest.fixture
def own_api(tmp_path: Path) -> Iterator[Api]:
    """Return an API for a test that kills it, its ledger, or its storage."""
    with running(tmp_path) as api:
        yield api


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with api.client() as client:
        yield client


@pytest.fixture
def http(api: Api) -> Iterator[httpx.Client]:
    """Return an HTTP client for requests that vcasgd's client never sends."""
    with api.http() as http:
        yield http


# --- emulated clouds ------------------------------------------------------------------------------


@pytest.fixture
def aws() -> Iterator[AwsBackend]:
    with aws_backend() as backend:
        yield backend


@pytest.fixture
def gcp() -> Iterator[GcpBackend]:
    with gcp_backend() as backend:
        yield backend


# --- torch --------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread in this process: several are slower for small batches."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- libraries whose import takes seconds, which tests of other files don't need ------------------


@pytest.fixture
def lightning() -> ModuleType:
    module: ModuleType = pytest.importorskip(
        "lightning.pytorch", reason="needs the extra lightning"
    )
    return module


@pytest.fixture
def transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers write into a folder of their own."""
    pytest.importorskip("transformers", reason="needs the extra huggingface")
    monkeypatch.chdir(tmp_path)
