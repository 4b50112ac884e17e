"""Fixtures with real servers that end after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.harness import HEARTBEAT, Harness


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
