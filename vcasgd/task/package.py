"""The user's code on its way to the workers: a zip known by its SHA-256."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from vcasgd.errors import PackageError

#: never part of a package; more patterns can be listed in ``.vcasgdignore``, one a line
IGNORED = (
    *(".git", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", "*.egg-info", ".DS_Store"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"),
)
IGNORE_FILE = ".vcasgdignore"
#: the same for every file, so that equal content gives an equal digest
_DATE = (1980, 1, 1, 0, 0, 0)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(directory: Path, limit_bytes: int) -> bytes:
    """The files of a working directory as a zip, the same bytes for the same content.

    Raises :class:`PackageError` where the directory is missing, empty, or larger than
    ``limit_bytes``; the largest files are named then.
    """
    if not directory.is_dir():
        raise PackageError(f"working_dir: {directory} is not a directory", field="working_dir")
    files = sorted(_files(directory))
    if not files:
        raise PackageError(f"working_dir: {directory} holds no files", field="working_dir")
    _check_size(directory, files, limit_bytes)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            info = zipfile.ZipInfo(path.relative_to(directory).as_posix(), _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, path.read_bytes())
    return buffer.getvalue()


def unpack(data: bytes, digest: str, into: Path) -> Path:
    """A package's files in ``into/<digest>``; done already, it is only looked up.

    Raises :class:`PackageError` where the digest does not match or a name leads outside.
    """
    target = into / digest
    if target.is_dir():
        return target
    if digest_of(data) != digest:
        raise PackageError(f"package {digest[:12]} arrived damaged: its digest does not match")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{digest}.") as scratch:
        _extract(data, Path(scratch, "files"))
        try:
            Path(scratch, "files").rename(target)
        except OSError:
            # another worker of this machine was faster
            if not target.is_dir():
                raise
    return target


def check(data: bytes, limit_bytes: int | None = None) -> None:
    """Refuses what is not a zip of harmless names that stays within a size when unpacked.

    Raises :class:`PackageError`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, ValueError) as error:
        raise PackageError(f"the package is not a zip file that can be read: {error}") from error
    for member in members:
        _check_name(member.filename)
    size = sum(member.file_size for member in members)
    if limit_bytes is not None and size > limit_bytes:
        raise PackageError(
            f"the package has {size / 1e6:.1f} MB unpacked, the limit is {limit_bytes / 1e6:.1f} MB"
        )


def _extract(data: bytes, into: Path) -> None:
    check(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(into)
    # RuntimeError: a password is needed; NotImplementedError is one too: an odd compression
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise PackageError(f"the package can't be read: {error}") from error


def _check_name(name: str) -> None:
    if name.startswith("/") or ".." in Path(name).parts or "\\" in name:
        raise PackageError(f"the package holds a file outside of itself: {name!r}")


def _files(directory: Path) -> Iterator[Path]:
    patterns = (*IGNORED, *_own_patterns(directory))
    for folder, folders, names in os.walk(directory):
        inside = Path(folder).relative_to(directory)
        folders[:] = [name for name in folders if not _ignored(inside / name, patterns)]
        for name in names:
            path = Path(folder) / name
            if not _ignored(inside / name, patterns) and path.is_file():
                yield path


def _own_patterns(directory: Path) -> list[str]:
    file = directory / IGNORE_FILE
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line.strip().rstrip("/") for line in lines if line.strip() and line[0] != "#"]


def _ignored(path: Path, patterns: tuple[str, ...]) -> bool:
    names = (path.name, path.as_posix())
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in names)


def _check_size(directory: Path, files: list[Path], limit_bytes: int) -> None:
    sizes = {path: path.stat().st_size for path in files}
    total = sum(sizes.values())
    if total <= limit_bytes:
        return
    largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
    names = ", ".join(
        f"{path.relative_to(directory)} ({sizes[path] / 1e6:.1f} MB)" for path in largest
    )
    raise PackageError(
        f"working_dir: {directory} has {total / 1e6:.1f} MB, the limit is "
        f"{limit_bytes / 1e6:.1f} MB; largest: {names}",
        remedy=f"list what is not code in {IGNORE_FILE}, or raise VCASGD_PACKAGE_LIMIT_MB",
        field="working_dir",
    )
