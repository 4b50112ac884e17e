"""The code of a user's files that a loop runs, and what of it changes gradients."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from vcasgd.task.gradient_changes import calls_in, find_changes, hook_changes, parsed

#: Packages whose calls that clip are recorded, or whose code isn't the loop's.
_WATCHED = ("torch", "accelerate", "lightning", "vcasgd")
#: Folder of Python's own modules.
_LIBRARY = sysconfig.get_paths()["stdlib"]
#: Lines that compute gradients, and code that changes them, by files.
_codes: dict[str, list[tuple[int, int, CodeType]]] = {}


def code_of_loop(frame: FrameType | None) -> str:
    """Return the code of the user's files that a frame runs or was called from.

    With it is that of functions and classes of others that they call and that use gradients.
    """
    variables: dict[str, Mapping[str, Any]] = {}
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_of_user(file):
            variables.setdefault(file, {**frame.f_globals, **frame.f_locals})
        frame = frame.f_back
    return _code_of(variables)


def code_of_classes(objects: Iterable[object]) -> str:
    """Return the code of the user's files that have the classes of objects, and what they call."""
    modules = [sys.modules[type(each).__module__] for each in objects]
    files = {getattr(each, "__file__", None) or "": vars(each) for each in modules}
    return _code_of({file: names for file, names in files.items() if _is_of_user(file)})


def _code_of(variables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the code of files, with what they call by these variables."""
    found = []
    for file, names in variables.items():
        source = Path(file).read_text(errors="replace")
        called = calls_in([parsed(source)])
        modules = [each for each in names.values() if isinstance(each, ModuleType)]
        own = [vars(each) for each in modules if _is_of_user(getattr(each, "__file__", "") or "")]
        items = chain(names.items(), *(each.items() for each in own))
        helpers = {name: each for name, each in items if name in called}
        codes = (_code_elsewhere(each, variables) for each in helpers.values())
        # That of a lambda may be a part of a statement, which can't be parsed.
        found += [source, *(code for code in codes if ".grad" in code and parsed(code).body)]
    return "\n\n".join(dict.fromkeys(found))


def _code_elsewhere(value: object, files: Container[str]) -> str:
    """Return the code of a function, or of a user's class, in other files; or nothing."""
    if not isinstance(value, FunctionType | type):
        return ""
    if (value.__module__ or "").partition(".")[0] in _WATCHED:
        return ""
    try:
        origin = inspect.getsourcefile(value) or ""
        if origin in files or (isinstance(value, type) and not _is_of_user(origin)):
            return ""
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return ""


def changes_of_hook(function: FunctionType) -> CodeType | None:
    """Return the code by which a function changes gradients; None if it can't run again."""
    code = function.__code__
    if not _is_of_user(code.co_filename):
        return None
    tree = parsed(_code_of({code.co_filename: function.__globals__}))
    changes = hook_changes(tree, function.__name__, code.co_firstlineno)
    return changes.compiled(code.co_filename) if changes else None


def changes_after(frame: FrameType | None) -> Callable[[], Callable[[], object]] | None:
    """Return what returns a call that changes again what the present call in a user's frame
    computes, with the variables that the frame has then.

    Searches ``frame`` and its callers.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_of_user(file):
            for first, last, code in _changes_in(file, frame):
                if first <= frame.f_lineno <= last:
                    return partial(_in_frame, code, frame)
        frame = frame.f_back
    return None


def _in_frame(code: CodeType, frame: FrameType) -> Callable[[], object]:
    """Return a call of code with the present variables of a frame, which it doesn't set."""
    return partial(exec, code, {**frame.f_globals, **frame.f_locals})


def _changes_in(file: str, frame: FrameType) -> list[tuple[int, int, CodeType]]:
    if file not in _codes:
        source = _code_of({file: {**frame.f_globals, **frame.f_locals}})
        found = find_changes(parsed(source))
        _codes[file] = [(each.first, each.last, each.compiled(file)) for each in found]
    return _codes[file]


@lru_cache
def _is_of_user(file: str) -> bool:
    path, own = Path(file), Path(__file__).parents[1]
    # Packages of a job are in a folder of such a name, too.
    if {"site-packages", "dist-packages"} & set(path.parts) or not path.is_file():
        return False
    return not any(path.is_relative_to(each) for each in (str(own), _LIBRARY))
