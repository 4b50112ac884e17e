"""A ledger belongs to one cluster, and its data have a format."""

from __future__ import annotations

import pytest
from support.children import ForkedProcess
from support.harness import Harness

from vcasgd.store import keys as names
from vcasgd.store.ledger.control import DATA_FORMAT, Control


def refused(harness: Harness, cluster: str, entry: str) -> str:
    """Return what a process says that must not start."""
    log = harness.home / "refused.log"
    env = {**harness.env, "VCASGD_CLUSTER": cluster, "VCASGD_TOKEN": "a-token"}
    assert ForkedProcess(entry, [], log, env).wait() == 1
    return log.read_text()


@pytest.mark.parametrize("module", ["parameter_server.main", "controller.main", "api.__main__"])
def test_a_process_of_another_cluster_does_not_start(harness: Harness, module: str) -> None:
    Control(harness.ledger.connection).claim("ours")

    said = refused(harness, "theirs", f"vcasgd.{module}:main")

    assert "the ledger belongs to cluster ours, not to theirs" in said


def test_data_of_a_newer_version_are_refused_by_each_process(harness: Harness) -> None:
    ledger = harness.ledger.connection
    Control(ledger).claim("ours")
    ledger.hset(names.DATA_FORMAT, mapping={"format": DATA_FORMAT + 1, "version": "9.1.0"})

    said = refused(harness, "ours", "vcasgd.api.__main__:main")

    assert f"data of format {DATA_FORMAT + 1}, which vcasgd 9.1.0 wrote" in said
    assert "install vcasgd 9.1.0" in said


def test_an_empty_ledger_has_the_present_format(harness: Harness) -> None:
    ledger = harness.ledger.connection
    ledger.delete(names.CLUSTER, names.DATA_FORMAT)

    Control(ledger).claim("ours")

    assert ledger.hget(names.DATA_FORMAT, "format") == str(DATA_FORMAT).encode()
