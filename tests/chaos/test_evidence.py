"""Evidence of a failed audit: enough to find the cause, and no secrets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stacks import server_url

from vcasgd.chaos import faults
from vcasgd.chaos.audit import audit, describe
from vcasgd.chaos.audited_job import as_lines, collect, counting_spec
from vcasgd.settings import Settings
from vcasgd.stack import StackHome, running
from vcasgd.store.connection import connect
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases

#: Seed of a plan whose first group contains only workers.
SEED = 11


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackHome]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), api_port=0)
    with running(settings, names=("ledger", "tensors")):
        yield StackHome(settings.home_path)


def test_evidence_describes_parts_job_and_workers(home: StackHome, tmp_path: Path) -> None:
    ledger = connect(server_url(home, "ledger"))
    jobs = Jobs(ledger)
    job = jobs.submit(counting_spec(2, tmp_path / "hold"), "digest").id
    Leases(ledger, job, f"{job}.local-1", 8.0).renew({"at": 1.0, "steps": 5}, [])
    jobs.event(job, "restored", "the model is back")

    found = collect(home, ledger, job)

    ledger.close()
    assert any("ledger: process" in line and ", ready," in line for line in found["parts"])
    assert "starting" in found["job"][0]
    assert "restored: the model is back" in found["events"][-1]
    assert '"steps": 5' in found["heartbeats"][0]
    assert "ready to accept connections" in " ".join(found["ledger log"]).lower()
    assert "ledger is ready" in "\n".join(as_lines(found))


def test_evidence_contains_no_secret(home: StackHome) -> None:
    # Given a part that logs all passwords
    secrets = json.loads(home.secrets_file.read_text()).values()
    home.log("talkative").write_text("\n".join(secrets))
    ledger = connect(server_url(home, "ledger"))

    text = json.dumps(collect(home, ledger, "unknown"))

    ledger.close()
    assert "***" in text
    assert not any(secret in text for secret in secrets)


def test_unreachable_ledger_hides_no_other_evidence(home: StackHome) -> None:
    nobody = connect("redis://127.0.0.1:1", answer_seconds=1)

    found = collect(home, nobody, "unknown")

    assert "StoreUnavailable" in found["events"][0]
    assert found["parts"]
    assert found["ledger log"]


@pytest.mark.extended
def test_failed_audit_keeps_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a fault that has no time to find a target
    monkeypatch.setattr(faults, "FIRE_SECONDS", 0.0)

    report = audit(lambda _text: None, kills=7, seed=SEED)

    assert not report.passed
    assert "the fault did not fire" in report.failure
    try:
        assert (Path(report.folder) / "home" / "logs" / "controller.log").exists()
        assert list(Path(report.folder).glob("ray/head/gcs_server*"))
        assert "submitted" in json.dumps(report.as_json()["evidence"]["events"])
        assert report.folder in list(describe(report))[-2]
    finally:
        shutil.rmtree(report.folder)
