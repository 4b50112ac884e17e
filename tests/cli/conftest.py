"""The command line, the home of its user, and a job file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.api_harness import Api
from support.command_line import JOB_FILE, Run
from typer.testing import CliRunner

from vcasgd.cli.commands import app


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Home of a user without settings; the folder doesn't exist yet."""
    for name in [name for name in os.environ if name.startswith("VCASGD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VCASGD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def bare(home: Path) -> Run:
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def run(bare: Run, api: Api, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("VCASGD_API_URL", api.url)
    monkeypatch.setenv("VCASGD_TOKEN", api.token)
    monkeypatch.setenv("VCASGD_PACKAGE_LIMIT_MB", "1")
    return bare


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("class Digits: ...\n")
    (folder / "job.yaml").write_text(JOB_FILE)
    return folder / "job.yaml"
