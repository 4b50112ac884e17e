"""Fixtures: an API that most tests share, and an own API for tests that break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.api_harness import Api, running
from vcasgd.client import Client


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
