"""Tiny wheels and wheels of vcasgd itself, for installations without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import vcasgd

ROOT = Path(__file__).parents[2]
#: Files that the build needs besides the package.
BUILD_FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore")


def copy_sources(folder: Path) -> None:
    """Copy what a wheel of vcasgd is built from, with placeholders for pages that are not built."""
    for name in ("vcasgd", "examples", *BUILD_FILES):
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / name)
    pages = folder / "vcasgd/api/static"
    if not (pages / "index.html").exists():
        (pages / "assets").mkdir(parents=True)
        (pages / "index.html").write_text("<!doctype html><title>vcasgd</title>")
        (pages / "assets" / "index.js").write_text("")


def build_own_wheel(folder: Path, version: str, index: Path) -> None:
    """Build a wheel of vcasgd as another version into ``index``."""
    folder.mkdir()
    copy_sources(folder)
    source = folder / "vcasgd/__init__.py"
    source.write_text(source.read_text().replace(vcasgd.__version__, version))
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(index)],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=600,
    )


def write_wheel(folder: Path, name: str, version: str, source: str, *requires: str) -> Path:
    """Write the wheel of a package with one module of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in files))
    return path
