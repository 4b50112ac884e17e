"""Fixtures with real servers that end after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.harness import HEARTBEAT, Plain


@pytest.fixture
def plain(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plain]:
    """A ledger and a tensors server, for the processes that a test starts. Logs go to the report.

    The parameter is the heartbeat in seconds. A lease lasts eight heartbeats, so only tests that
    wait for the end of a lease use a short one.
    """
    yield from _ended(Plain(tmp_path, heartbeat=getattr(request, "param", HEARTBEAT)))


@pytest.fixture
def sharded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plain]:
    """``plain`` with three store nodes."""
    yield from _ended(Plain(tmp_path, heartbeat=getattr(request, "param", HEARTBEAT), nodes=3))


def _ended(stage: Plain) -> Iterator[Plain]:
    try:
        yield stage
    finally:
        stage.end()
        sys.stdout.write(stage.logs())
