"""Packages: the user's code as a zip that is identified by its SHA-256.

Ignore patterns have gitignore's semantics (https://git-scm.com/docs/gitignore#_pattern_format),
relative to the working directory:

* A pattern without a slash, such as ``*.bin``, matches files and folders of that name at any depth.
* A pattern with a slash at its start or inside, such as ``data/raw``, matches only that path.
* A pattern with a slash at its end matches only folders, with all that they contain.
* ``*`` and ``?`` don't match a slash; ``**`` matches any number of folders; ``[a-z]`` is a range.
* ``!`` re-includes what an earlier line excludes, except in an excluded folder. The last matching
  line decides.
* Blank lines and lines that start with ``#`` are skipped; ``\\`` escapes a special character.

Unlike in git, spaces around a line are dropped, only the file in the working directory itself
counts, and :data:`IGNORED` can't be re-included, nor the home of a stack, which has its secrets.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from pathspec import GitIgnoreSpec

from vcasgd.errors import PackageError
from vcasgd.limits import MAX_PACKAGE_FILES

#: Patterns that are never part of a package; ``.vcasgdignore`` can list more, one per line.
IGNORED = (
    *(".git", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", "*.egg-info", ".DS_Store"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"),
    # Credentials, if the folder is a user's home.
    *(".ssh", ".aws", ".gnupg", ".kube", ".netrc"),
)
IGNORE_FILE = ".vcasgdignore"
#: A folder with this file is the home of a stack.
HOME_FILE = "stack.lock"
#: What each entry in the directory of a zip begins with.
_FILE_SIGNATURE = b"PK\x01\x02"
#: Date of every file in a package, so that equal content gives an equal digest.
_DATE = (1980, 1, 1, 0, 0, 0)


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of a package as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def pack(directory: Path, limit_bytes: int) -> bytes:
    """Return the files of a working directory as a zip; equal content gives equal bytes.

    Raises :class:`PackageError` if the directory is missing, contains no files, or is larger than
    ``limit_bytes``, in which case the error names the largest files.
    """
    if not directory.is_dir():
        raise PackageError(f"working_dir: {directory} is not a directory", field="working_dir")
    files = sorted(packed_files(directory))
    if not files:
        raise PackageError(f"working_dir: {directory} contains no files", field="working_dir")
    _check_size(directory, files, limit_bytes)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            info = zipfile.ZipInfo(path.relative_to(directory).as_posix(), _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, path.read_bytes())
    return buffer.getvalue()


def unpack(data: bytes, digest: str, into: Path, limit_bytes: int | None = None) -> Path:
    """Extract a package to ``into/<digest>``, unless that exists, and return the folder.

    ``limit_bytes`` limits its unpacked size. Raises :class:`PackageError` if it is larger, if the
    digest doesn't match, or if a file name leads outside.
    """
    target = into / digest
    if target.is_dir():
        return target
    if digest_of(data) != digest:
        raise PackageError(f"package {digest[:12]} is damaged: digest mismatch")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{digest}.") as scratch:
        _extract(data, Path(scratch, "files"), limit_bytes)
        try:
            Path(scratch, "files").rename(target)
        except OSError:
            # Another worker on this machine was faster.
            if not target.is_dir():
                raise
    return target


def check(data: bytes, limit_bytes: int | None = None) -> None:
    """Raise :class:`PackageError` unless ``data`` is a zip with safe names.

    ``limit_bytes`` limits its unpacked size.
    """
    # Each file has one, so this counts no fewer, and takes no memory.
    if data.count(_FILE_SIGNATURE) > MAX_PACKAGE_FILES:
        raise PackageError(
            f"the package has more than {MAX_PACKAGE_FILES} files",
            remedy=f"list files that are not code in {IGNORE_FILE}",
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, ValueError) as error:
        raise PackageError(f"the package is not a readable zip file: {error}") from error
    for member in members:
        _check_name(member.filename)
    size = sum(member.file_size for member in members)
    if limit_bytes is not None and size > limit_bytes:
        raise PackageError(
            f"the package has {size / 1e6:.1f} MB unpacked, the limit is {limit_bytes / 1e6:.1f} MB"
        )


def _extract(data: bytes, into: Path, limit_bytes: int | None) -> None:
    check(data, limit_bytes)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(into)
    # RuntimeError: encrypted, or (as NotImplementedError) an unsupported compression.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise PackageError(f"the package can't be read: {error}") from error


def _check_name(name: str) -> None:
    if name.startswith("/") or ".." in Path(name).parts or "\\" in name:
        raise PackageError(f"the package contains a file outside itself: {name!r}")


def packed_files(directory: Path) -> Iterator[Path]:
    ignored = _ignored(directory)
    for folder, folders, names in os.walk(directory):
        inside = Path(folder).relative_to(directory)
        if HOME_FILE in names:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not ignored.match_file(f"{inside / name}/")]
        for name in names:
            path = Path(folder) / name
            if not ignored.match_file(inside / name) and path.is_file():
                yield path


def _ignored(directory: Path) -> GitIgnoreSpec:
    file = directory / IGNORE_FILE
    lines = file.read_text().splitlines() if file.is_file() else []
    try:
        # The last match decides, so no pattern of the file can re-include IGNORED.
        return GitIgnoreSpec.from_lines([*(line.strip() for line in lines), *IGNORED])
    except ValueError as error:
        raise PackageError(f"{file}: invalid pattern: {error}", field="working_dir") from error


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
