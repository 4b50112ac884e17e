"""Packages: the user's code as a zip that is identified by its SHA-256, and checks of its files.

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

import ast
import hashlib
import importlib.util
import io
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from pathspec import GitIgnoreSpec

from vcasgd.errors import PackageError, SpecError, TaskImportError
from vcasgd.limits import MAX_PACKAGE_FILES
from vcasgd.spec.job import JobSpec
from vcasgd.spec.problems import did_you_mean
from vcasgd.spec.update import SettingWarning

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
        _check_member(member)
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
    # RuntimeError: encrypted, or (as NotImplementedError) patched data.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise PackageError(f"the package can't be read: {error}") from error


def _check_member(member: zipfile.ZipInfo) -> None:
    name = member.filename
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # Others raise errors of their own, and can take gigabytes for a dictionary.
        raise PackageError(f"the package contains a file that is not deflated: {name!r}")
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


# -- checks that run none of the code --------------------------------------------------------------
#
# What a worker may have and this computer lacks, such as a library, is a warning.

#: Libraries that every worker has.
_PRESENT = frozenset({*sys.stdlib_module_names, "vcasgd", "torch", "numpy"})
#: Most modules of the working directory whose imports are followed.
MAX_MODULES = 500


def check_files(spec: JobSpec) -> list[SettingWarning]:
    """Check the files of a job in its ``working_dir``, and return what may be missing on workers.

    Raises :class:`SpecError` for a file, a module, or a class that doesn't exist, and
    :class:`TaskImportError` for a module that isn't Python.
    """
    folder = Path(spec.working_dir)
    if not folder.is_dir():
        raise SpecError(f"working_dir: {folder} is not a directory", field="working_dir")
    files = {path.relative_to(folder).as_posix() for path in packed_files(folder)}
    if spec.requirements is not None:
        _check_packed("requirements", str(Path(spec.requirements)), folder, files)
    if spec.start_from is not None and spec.start_from.file is not None:
        _check_packed("start_from", spec.start_from.file, folder, files)
    start = _task_file(spec, folder, files)
    if start is None:
        return []
    missing = _missing_imports(folder, files, start)
    if spec.requirements is not None or spec.setup:
        return []
    return [
        SettingWarning(
            "task",
            f"{where} imports {name}, which is neither in working_dir nor installed here",
            did_you_mean(name, _modules(files)) or "list it in a file that requirements names",
        )
        for name, where in missing.items()
    ]


def _check_packed(field: str, name: str, folder: Path, files: set[str]) -> None:
    if name in files:
        return
    if (folder / name).is_file():
        text, remedy = f"{name} is excluded by .vcasgdignore", "remove that pattern"
        raise SpecError(f"{field}: {text}", remedy=remedy, field=field)
    text = f"there is no {name} in {folder}"
    raise SpecError(f"{field}: {text}", remedy=did_you_mean(name, files), field=field)


def _task_file(spec: JobSpec, folder: Path, files: set[str]) -> str | None:
    """Return the file of the task; None if its module is a library."""
    module, colon, name = spec.task.partition(":")
    if not colon:
        _check_packed("task", spec.task, folder, files)
        _parse(folder, spec.task)
        # Or else it would train to its end before a worker finds out.
        sources = [spec.task, *(name for name in files if name.endswith(".py"))]
        if not any(b"vcasgd" in (folder / name).read_bytes() for name in sources):
            raise SpecError(
                f"task: {spec.task} has no vcasgd.Session, nor has a file beside it",
                remedy="train in a loop over session.batches(dataset) or session.loader(dataset), "
                "or name a TrainerTask or a ModuleTask of its trainer as task",
                field="task",
            )
        return spec.task
    file = _file_of(module, files)
    if file is None:
        _check_library(spec, module, folder, files)
        return None
    names = set(_top_names(_parse(folder, file)))
    if name not in names and "*" not in names:
        raise SpecError(
            f"task: {file} has no {name}",
            remedy=did_you_mean(name, names) or "name one of its classes",
            field="task",
        )
    return file


def _check_library(spec: JobSpec, module: str, folder: Path, files: set[str]) -> None:
    if _file_of(module.partition(".")[0], files) is None and (
        spec.requirements or spec.setup or _is_installed(module)
    ):
        return
    raise SpecError(
        f"task: there is no module {module} in {folder}",
        remedy=did_you_mean(module, _modules(files)) or "check working_dir and .vcasgdignore",
        field="task",
    )


def _missing_imports(folder: Path, files: set[str], start: str) -> dict[str, str]:
    """Return the libraries that the task imports and this computer lacks, each with the importer.

    Only imports at the top of modules count: others may be in code for other machines.
    """
    missing: dict[str, str] = {}
    waiting, seen = [start], {start}
    while waiting and len(seen) < MAX_MODULES:
        file = waiting.pop()
        for name in _imports(_parse(folder, file)):
            local = _file_of(name, files) or _file_of(name.partition(".")[0], files)
            if local is not None and local not in seen:
                seen.add(local)
                waiting.append(local)
            elif local is None and not _is_installed(name):
                missing.setdefault(name.partition(".")[0], file)
    return missing


def _parse(folder: Path, file: str) -> ast.Module:
    try:
        return ast.parse((folder / file).read_bytes(), file)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise TaskImportError(f"task: {file}{line}: {error}", field="task") from error


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _top_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines at its top, also in branches of ``if`` and ``try``."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case _:
                waiting += ast.iter_child_nodes(node)


def _file_of(module: str, files: set[str]) -> str | None:
    path = module.replace(".", "/")
    found = (name for name in (f"{path}.py", f"{path}/__init__.py") if name in files)
    if (file := next(found, None)) is not None:
        return file
    # A folder without __init__.py is a package too.
    inside = next((name for name in sorted(files) if name.startswith(f"{path}/")), None)
    return inside if inside and inside.endswith(".py") and "." not in module else None


def _modules(files: set[str]) -> list[str]:
    names = (name.removesuffix("/__init__.py").removesuffix(".py") for name in files if
             name.endswith(".py"))  # fmt: skip
    return [name.replace("/", ".") for name in names]


def _is_installed(module: str) -> bool:
    top = module.partition(".")[0]
    if top in _PRESENT:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
