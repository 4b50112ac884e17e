"""The wheel contains the dashboard, and the example for ``vcasgd demo``."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from support.wheels import BUILD_FILES, ROOT, copy_sources

from vcasgd.api import STATIC
from vcasgd.api.pages import Pages

PAGES = "vcasgd/api/static/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the source, through the source distribution."""
    folder = tmp_path_factory.mktemp("source")
    # without Node.js there are no pages; placeholders still show that pages are included
    copy_sources(folder)
    built = _build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def _build(
    folder: Path, *options: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", "dist", "."]
    env = os.environ if path is None else {**os.environ, "PATH": path}
    return subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600
    )


def _served_pages(wheel: Path, folder: Path) -> list[str]:
    """Check what a wheel contains, and that its dashboard is served; return the pages' names."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder)
    assert {"vcasgd/py.typed", "vcasgd/_examples/digits/train.py"} <= set(names)
    assert "vcasgd/store/scripts/tensors/commit.lua" in names
    assert not any(name.startswith(("tests/", "dashboard/")) for name in names)
    pages = [name for name in names if name.startswith(PAGES)]
    assert f"{PAGES}index.html" in pages
    assert any(name.startswith(f"{PAGES}assets/") and name.endswith(".js") for name in pages)
    app = Pages(Starlette(), static=folder / PAGES, others=("/api/",))

    async def text() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://pages") as client:
            return (await client.get("/jobs/some-job")).text

    assert "<title>vcasgd</title>" in asyncio.run(text())
    return pages


def test_a_wheel_has_scripts_examples_and_pages_and_no_tests(wheel: Path, tmp_path: Path) -> None:
    pages = _served_pages(wheel, tmp_path)
    if STATIC.is_dir():
        built = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*")}
        assert {name.removeprefix(PAGES) for name in pages} == built


@pytest.mark.ci
def test_a_wheel_built_in_a_fresh_clone_serves_the_dashboard(tmp_path: Path) -> None:
    # Given the files of a clone, without any that were built
    clone = tmp_path / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if not name.startswith(("docs/", "tests/", "benchmarks/")) and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    assert not (clone / PAGES).exists()
    if (ROOT / "dashboard/node_modules").is_dir():
        (clone / "dashboard/node_modules").symlink_to((ROOT / "dashboard/node_modules").resolve())
    # When its wheel is built, with the Node.js of make, or with an installed one
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    built = _build(clone, "--wheel", path=path)
    # Then the API serves the dashboard from it
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (clone / "dist").glob("*.whl")
    assert len(_served_pages(wheel, tmp_path / "unpacked")) > 2


@pytest.mark.parametrize(
    ("sources", "remedy"),
    [
        (True, "building the dashboard needs Node.js 20.19 or newer"),
        (False, "build from a clone or a source distribution"),
    ],
)
def test_a_build_without_pages_or_tools_names_the_remedy(
    sources: bool, remedy: str, tmp_path: Path
) -> None:
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "vcasgd").mkdir()
    shutil.copy(ROOT / "vcasgd/__init__.py", tmp_path / "vcasgd/__init__.py")
    if sources:
        shutil.copytree(ROOT / "dashboard/src", tmp_path / "dashboard/src")

    built = _build(tmp_path, "--wheel", "--skip-dependency-check", path="")

    assert built.returncode != 0
    assert remedy in built.stdout + built.stderr


@pytest.mark.extended
def test_a_wheel_works_in_empty_environments(wheel: Path) -> None:
    script = ROOT / "tests/support/empty_environment.py"

    done = subprocess.run(
        [sys.executable, str(script), str(wheel), "--offline"],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "a client without torch, and a stack that trains" in done.stdout
