"""Checks of a job's files that run none of its code: what is missing or misspelled.

They read the working directory as it would be packed. What a worker may have and this computer
lacks, such as a library, is a warning.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from vcasgd.errors import SpecError, TaskImportError
from vcasgd.spec.job import JobSpec
from vcasgd.spec.problems import did_you_mean
from vcasgd.spec.update import SettingWarning
from vcasgd.task.package import packed_files

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
