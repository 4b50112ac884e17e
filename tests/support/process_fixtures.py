"""Real servers for the loops, ended after each test whatever became of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.harness import HEARTBEAT, Plain


@pytest.fixture
def plain(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plain]:
    """Ledger and tensors, and whatever a test starts on them. Logs are shown after a failure.

    The parameter, if there is one, is the heartbeat in seconds: leases last eight of them, so
    that only those tests have a short one that wait for the end of a lease.
    """
    yield from _ended(Plain(tmp_path, heartbeat=getattr(request, "param", HEARTBEAT)))


@pytest.fixture
def sharded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plain]:
    """As ``plain``, with three store nodes."""
    yield from _ended(Plain(tmp_path, heartbeat=getattr(request, "param", HEARTBEAT), nodes=3))


def _ended(stage: Plain) -> Iterator[Plain]:
    try:
        yield stage
    finally:
        stage.end()
        sys.stdout.write(stage.logs())
