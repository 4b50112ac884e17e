"""A ledger belongs to one cluster, and its data have a format."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.harness import Harness

from vcasgd.store import keys as names
from vcasgd.store.ledger.control import DATA_FORMAT, Control


@pytest.mark.parametrize("module", ["parameter_server.main", "controller.main", "api"])
@pytest.mark.ci
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


def test_data_of_a_newer_version_are_refused_by_each_process(harness: Harness) -> None:
    ledger = harness.ledger.connection
    Control(ledger).claim("ours")
    ledger.hset(names.DATA_FORMAT, mapping={"format": DATA_FORMAT + 1, "version": "9.1.0"})

    done = subprocess.run(
        [sys.executable, "-m", "vcasgd.api"],
        env={**os.environ, **harness.env, "VCASGD_CLUSTER": "ours", "VCASGD_TOKEN": "a-token"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    said = done.stderr + done.stdout
    assert done.returncode == 1
    assert f"data of format {DATA_FORMAT + 1}, which vcasgd 9.1.0 wrote" in said
    assert "install vcasgd 9.1.0" in said


def test_an_empty_ledger_has_the_present_format(harness: Harness) -> None:
    ledger = harness.ledger.connection
    ledger.delete(names.CLUSTER, names.DATA_FORMAT)

    Control(ledger).claim("ours")

    assert ledger.hget(names.DATA_FORMAT, "format") == str(DATA_FORMAT).encode()
