"""Machines of a local pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_machines import LocalCluster


@pytest.fixture
def cluster(tmp_path: Path, eventually: Callable[..., Any]) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path, eventually) as cluster:
        yield cluster
