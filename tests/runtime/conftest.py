"""Real servers for the loops, ended after each test whatever became of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Plain


@pytest.fixture
def plain(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plain]:
    """Ledger and tensors, and whatever a test starts on them. Logs are shown after a failure.

    The parameter, if there is one, is the heartbeat in seconds.
    """
    stage = Plain(tmp_path, heartbeat=getattr(request, "param", 0.25))
    try:
        yield stage
    finally:
        stage.end()
        sys.stdout.write(stage.logs())
