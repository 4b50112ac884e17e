"""The home of the command line's user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Home of a user without settings; the folder doesn't exist yet."""
    for name in [name for name in os.environ if name.startswith("VCASGD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VCASGD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
