"""Machines of a local pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_machines import LocalCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path) as cluster:
        yield cluster
