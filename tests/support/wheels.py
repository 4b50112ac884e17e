"""Tiny wheels and wheels of vcasgd itself, for installations without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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


def build_own_wheel(folder: Path, index: Path) -> Path:
    """Build a wheel of vcasgd into ``index``."""
    folder.mkdir()
    copy_sources(folder)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(index)],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=600,
    )
    (wheel,) = index.glob("vcasgd-*.whl")
    return wheel


def rename_wheel(wheel: Path, version: str, other: str) -> None:
    """Copy a wheel of vcasgd as another version."""
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(wheel.with_name(wheel.name.replace(version, other)), "w") as target,
    ):
        for file in source.namelist():
            content = source.read(file)
            if file.endswith(("/METADATA", "/RECORD")) or file == "vcasgd/__init__.py":
                content = content.replace(version.encode(), other.encode())
            target.writestr(file.replace(f"-{version}.", f"-{other}."), content)


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
