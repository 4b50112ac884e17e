"""``vcasgd top``."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from support.api_harness import Api
from support.fleet_records import machine_row
from typer.testing import CliRunner

from vcasgd.cli.commands import app


@pytest.fixture
def shown(api: Api, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "150")

    def top(*arguments: str) -> str:
        options = ["--url", api.url, "--token", api.token]
        result = CliRunner().invoke(app, ["top", *arguments, *options])
        assert result.exit_code == 0, result.output
        return result.output

    return top


def test_top_shows_jobs_machines_pools_and_servers(api: Api, shown: Any) -> None:
    job, over = api.submit(), api.submit()
    api.start_job(job)
    api.finish(over)
    api.account(job, 4, 1, updates=4, applied=100)
    api.leases(job).renew({"pushed_bytes": 1_500_000, "fetched_bytes": 4_000_000_000}, [])
    machines = {
        "i-1": machine_row("i-1", job=job, price_per_hour=1.5),
        "i-2": machine_row("i-2", state="leaving", price_per_hour=0, launched_at=time.time()),
    }
    api.control.publish(machines, {"local": {"reason": "no capacity in z"}})
    api.servers.beat(
        "node-0", {"memory_used_bytes": 5_000_000, "memory_limit_bytes": 9_000_000,
                   "queued": {job: 3}, "publications_per_second": 2.5}
    )  # fmt: skip

    text = shown()

    for word in (job, "1/2", "50%", "i-1", "i-2", "leaving", "1 leaving, 1 running", "$1.50",
                 "5 MB of 9 MB", "2.5",
                 "1.5 MB", "4.0 GB", "local: no capacity in z", "ledger"):  # fmt: skip
        assert word in text, word
    assert over not in text
    row = next(line for line in text.splitlines() if "node-0" in line)
    assert row.split()[-2:] == ["3", "2.5"]
    overview = json.loads(shown("--json"))
    assert [row["id"] for row in overview["jobs"]] == [job]
    assert overview.keys() == {"jobs", "machines", "pools", "store", "spend"}


def test_top_shows_a_job_without_a_machine_as_queued(api: Api, shown: Any) -> None:
    job = api.submit()
    place = {"text": "no machine is available", "position": 1, "length": 1, "has_machines": False}
    api.jobs.set_waiting({job: place})

    (row,) = (line for line in shown("--once").splitlines() if job in line)
    assert row.split()[1] == "queued"


def test_top_shows_an_active_job_behind_many_newer_ended_ones(api: Api, shown: Any) -> None:
    job = api.submit()
    api.start_job(job)
    for _ in range(40):
        api.finish(api.submit())

    assert job in shown("--once")


def test_top_shows_an_empty_fleet(shown: Any) -> None:
    text = shown("--once")

    assert "no active jobs" in text
    assert "no machines" in text
