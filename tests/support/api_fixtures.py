"""An API that most tests share, and one of their own for those that break it."""

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
    """With an empty ledger."""
    shared_api.connection.flushall()
    return shared_api


@pytest.fixture
def own_api(tmp_path: Path) -> Iterator[Api]:
    """For a test that kills it, or what is behind it."""
    with running(tmp_path) as api:
        yield api


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with api.client() as client:
        yield client


@pytest.fixture
def http(api: Api) -> Iterator[httpx.Client]:
    """For what a client of ours would never send."""
    with api.http() as http:
        yield http
