"""A ledger belongs to one cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.harness import Harness

from vcasgd.store.ledger.control import Control


@pytest.mark.parametrize("module", ["parameter_server.main", "controller.main", "api"])
def test_a_process_of_another_cluster_does_not_start(harness: Harness, module: str) -> None:
    Control(harness.ledger.connection).claim("ours")

    done = subprocess.run(
        [sys.executable, "-m", f"vcasgd.{module}"],
        env={**os.environ, **harness.env, "VCASGD_CLUSTER": "theirs", "VCASGD_TOKEN": "a-token"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 1
    assert "the ledger belongs to cluster ours, not to theirs" in done.stderr + done.stdout
