"""The wheel contains the dashboard, and the example for ``vcasgd demo``."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from vcasgd.api.pages import STATIC, Pages

ROOT = Path(__file__).parents[2]
PAGES = "vcasgd/api/static/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the source, through the source distribution."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("vcasgd", "examples", "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / name)
    if not (folder / PAGES / "index.html").exists():
        # without Node.js there are no pages; placeholders still show that pages are included
        (folder / PAGES / "assets").mkdir(parents=True)
        (folder / PAGES / "index.html").write_text("<!doctype html><title>vcasgd</title>")
        (folder / PAGES / "assets" / "index.js").write_text("")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def test_pages_in_a_wheel_are_served(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)

    pages = [name for name in names if name.startswith(PAGES)]
    assert f"{PAGES}index.html" in pages
    assert any(name.startswith(f"{PAGES}assets/") and name.endswith(".js") for name in pages)
    app = Pages(Starlette(), static=tmp_path / PAGES, others=("/api/",))
    assert "<title>vcasgd</title>" in asyncio.run(_text(app, "/jobs/some-job"))
    if STATIC.is_dir():
        built = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*")}
        assert {name.removeprefix(PAGES) for name in pages} == built


async def _text(app: Pages, path: str) -> str:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pages") as client:
        return (await client.get(path)).text


def test_a_wheel_contains_scripts_and_examples_but_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {"vcasgd/py.typed", "vcasgd/_examples/digits/train.py"} <= names
    assert "vcasgd/store/scripts/tensors/commit.lua" in names
    assert not any(name.startswith(("tests/", "dashboard/")) for name in names)
