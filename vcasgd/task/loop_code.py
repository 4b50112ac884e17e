"""The code of a user's files that a loop runs, and what of it changes gradients or rates."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, count, pairwise
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from vcasgd.errors import UserCodeError
from vcasgd.task.gradient_changes import (
    calls_in,
    find_changes,
    flow,
    hook_changes,
    names_in,
    parsed,
)

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


# -- loops around a frame --------------------------------------------------------------------------

_LOOPS = (ast.For, ast.While)


def count_loops(frame: FrameType | None, folder: Path, *, repeated: bool = False) -> int:
    """Return the number of loops that a frame runs or was called from, in files below ``folder``.

    A loop that is about to start, because its iterator is made, doesn't count, nor does one over a
    single value if ``repeated``.
    """
    running = ((each, _running(around, each.f_lineno)) for each, around in _places(frame, folder))
    return sum(not (repeated and _turns_once(loop, at)) for at, loops in running for loop in loops)


def loops_around(frame: FrameType | None, folder: Path) -> list[str]:
    """Return the code of the loops that a frame is in, is about to start, or was called from.

    The innermost one is first.
    """
    found = (each for _, around in _places(frame, folder) for each in reversed(around))
    return [ast.unparse(each) for each in found if isinstance(each, _LOOPS)]


def _places(frame: FrameType | None, folder: Path) -> Iterator[tuple[FrameType, list[ast.AST]]]:
    """Yield a frame and its callers, each with its function and the statements in it that contain
    the present line, the outermost first."""
    while frame is not None:
        file, line = Path(frame.f_code.co_filename), frame.f_lineno
        if file.is_absolute() and file.is_relative_to(folder):
            tree = parsed("".join(linecache.getlines(str(file))))
            around = [tree, *(each for each in ast.walk(tree) if _contains(each, line))]
            yield frame, around[max(n for n, each in enumerate(around) if _is_scope(each)) :]
        frame = frame.f_back


def _is_scope(node: ast.AST) -> bool:
    kinds = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return isinstance(node, kinds)


def _contains(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)


def _running(around: Iterable[ast.AST], line: int) -> list[ast.For | ast.While]:
    # A loop that is written in one line is about to start.
    loops = (each for each in around if isinstance(each, _LOOPS))
    return [each for each in loops if each.lineno < line and each.body[0].lineno <= line]


def _turns_once(loop: ast.AST, frame: FrameType) -> bool:
    """Return True for a loop over a single value, as far as the variables of its frame say."""
    if isinstance(loop, ast.For) and calls_in([loop.iter]) <= {"range"}:
        code = compile(ast.Expression(loop.iter), "<loop>", "eval")
        with suppress(Exception):
            return len(eval(code, frame.f_globals, frame.f_locals)) == 1
    return False


# -- code that a job doesn't run -------------------------------------------------------------------

#: Calls that a user doesn't miss, besides those of builtins: reports, clean-up, times, and tests.
_NOT_MISSED = re.compile(
    r"log|info|debug|warn(ing)?|format|join|item|time|perf_counter|monotonic|now|timedelta|exit"
    r"|close|flush|finish|end(_\w+)?|clean_?up|shutdown|teardown|synchronize|empty_cache|collect"
    r"|eval|no_grad|inference_mode|autocast|barrier|wait_for_everyone|destroy_process_group"
    r"|is_\w+|get_(rank|world_size)|exists"
)


def not_run(frame: FrameType | None, folder: Path, outer: int) -> str:
    """Return file, line, and call of the first code that a job doesn't run and a user misses.

    ``frame`` runs the loop that the job ends in. Of those around it, the outermost first, ``outer``
    have no part in the job. Empty without such code.
    """
    after: list[tuple[FrameType, ast.AST]] = []
    for each, around in reversed([*_places(frame, folder)]):
        loops = [statement for statement in around if isinstance(statement, _LOOPS)]
        repeated = [loop for loop in loops if not _turns_once(loop, each)]
        for loop in loops[:outer]:
            if loop in repeated:
                return f"{_position(each, loop, folder)}: further turns of the loop"
        ends = around.index(repeated[0]) + 1 if repeated else None
        after[:0] = [(each, statement) for statement in _sides(around[:ends])[1]]
        if repeated:
            break
        outer = max(outer - len(loops), 0)
    for each, statement in after:
        for call in _missed(statement):
            return f"{_position(each, call, folder)}: {ast.unparse(call.func)}(…)"
    return ""


def _position(frame: FrameType, node: ast.stmt | ast.expr, folder: Path) -> str:
    return f"{Path(frame.f_code.co_filename).relative_to(folder)}, line {node.lineno}"


def _missed(statement: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of a statement that do more than report or clean up, in their order."""
    if _is_scope(statement):
        return
    if isinstance(statement, ast.Call):
        name = ast.unparse(statement.func).rpartition(".")[2]
        if name == "open" or not (hasattr(builtins, name) or _NOT_MISSED.fullmatch(name)):
            yield statement
    for each in ast.iter_child_nodes(statement):
        yield from _missed(each)


# -- learning rates that a loop sets between epochs ------------------------------------------------

#: Calls of code that trains, evaluates, or stores, which isn't run again for its rates.
_APART = {"backward", "zero_grad", "no_grad", "eval", "train", "cuda", "to", "save"}
#: Calls in conditions that are the same in each epoch.
_CHECKS = {"isinstance", "hasattr", "len", "bool"}
#: A loop that asks for these sets its rates by the step of the job.
_OF_JOB = re.compile(r"\bsession\.(epoch|global_step)\b")
_UNKNOWN = object()


@dataclass(frozen=True)
class EpochRates:
    """Code of a loop that sets learning rates between epochs, by its ``counter`` of them.

    ``variables`` have their values in the first epoch; ``schedulers`` are those that it steps.
    ``statements`` are its code.
    """

    counter: str
    variables: Mapping[str, Any]
    after: CodeType
    before: CodeType
    schedulers: Sequence[Any]
    statements: Sequence[str]

    def replay(self) -> Callable[[], None]:
        """Return a function that sets the rates of the second epoch, then those of the next one,
        and so on."""
        names, epochs = dict(self.variables), count(self.variables[self.counter])
        names[self.counter] = next(epochs)

        def advance() -> None:
            exec(self.after, names)
            names[self.counter] = next(epochs)
            exec(self.before, names)

        return advance


def rates_of_epochs(
    frame: FrameType | None, folder: Path, schedulers: Sequence[Any]
) -> EpochRates | None:
    """Return the code that sets the rates of each epoch, in files below ``folder``.

    None if that is nothing but the same steps of ``schedulers`` after each epoch, or if the loop
    doesn't count its epochs. Raises :class:`UserCodeError` if rates depend on more than that.
    """
    for each, around in _places(frame, folder):
        source = "".join(linecache.getlines(each.f_code.co_filename))
        if _OF_JOB.search(source):
            return None
        if loops := _running(around, each.f_lineno):
            counter = getattr(getattr(loops[-1], "target", None), "id", "")
            variables = {**each.f_globals, **each.f_locals}
            if not isinstance(variables.get(counter), int):
                return None
            path = around[around.index(loops[-1]) :]
            return _RateSearch(counter, variables, parsed(source), path, schedulers).found()
    return None


class _RateSearch:
    """Search for the statements between epochs that set rates, and for what they depend on.

    ``path`` are the statements from the loop over epochs to the one that gets its batches, each of
    which contains the next.
    """

    def __init__(
        self,
        counter: str,
        variables: Mapping[str, Any],
        tree: ast.Module,
        path: Sequence[ast.AST],
        schedulers: Sequence[Any],
    ) -> None:
        self._counter, self._variables, self._schedulers = counter, variables, schedulers
        self._tree = tree
        self._loop, self._before, self._after = path[0], *_sides(path)
        self._stepped: list[Any] = []
        self._changed = self._changed_attributes()

    def found(self) -> EpochRates | None:
        """Do what :func:`rates_of_epochs` does."""
        needed: set[str] = set()
        while True:
            after, before = (self._kept(each, needed) for each in (self._after, self._before))
            names = {name for each in (*after, *before) for name in names_in(each, ast.Load)}
            if names <= needed:
                break
            needed |= names
        if all(map(self._is_usual, after)) and not before:
            return None
        self._check([*after, *before])
        return EpochRates(
            self._counter,
            self._variables,
            *(_compiled(after), _compiled(before), self._stepped),
            statements=[ast.unparse(each) for each in (*after, *before)],
        )

    def _kept(self, body: Iterable[ast.stmt], needed: Container[str]) -> list[ast.stmt]:
        """Return the statements that set rates, or one of the variables that are ``needed``."""
        kept: list[ast.stmt] = []
        for each in body:
            if isinstance(each, ast.If):
                if (branch := self._only_branch(each)) is not None:
                    kept += self._kept(branch, needed)
                    continue
                first, other = self._kept(each.body, needed), self._kept(each.orelse, needed)
                if first or other:
                    chosen = ast.If(each.test, first or [ast.Pass()], other)
                    kept.append(ast.copy_location(chosen, each))
            elif any(map(self._sets_rates, ast.walk(each))) or (
                isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign)
                and any(name in needed for name in names_in(each, ast.Store))
            ):
                kept.append(each)
        return kept

    def _only_branch(self, choice: ast.If) -> list[ast.stmt] | None:
        """Return the branch that is taken in each epoch; None if that may vary."""
        attributes = [each for each in ast.walk(choice.test) if isinstance(each, ast.Attribute)]
        if (
            names_in(choice.test, ast.Load) & names_in(self._loop, ast.Store)
            or not calls_in([choice.test]) <= _CHECKS
            or {each.attr for each in attributes} & self._changed
        ):
            return None
        code = compile(ast.Expression(choice.test), "<loop>", "eval")
        with suppress(Exception):
            return choice.body if eval(code, dict(self._variables)) else choice.orelse
        return None

    def _sets_rates(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return _assigns_rate(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            owner = self._value(node.func.value)
            if any(owner is each for each in self._schedulers):
                self._stepped.append(owner)
                return True
            counts = any(self._counter in names_in(each, ast.Load) for each in node.args)
            # A scheduler of another library.
            if counts and hasattr(owner, "optimizer") and not _is_of_user(_file_of(owner)):
                return True
        tree = self._function(node)
        return tree is not None and any(map(_assigns_rate, ast.walk(tree)))

    def _is_usual(self, statement: ast.stmt) -> bool:
        """Return True for the step of a scheduler without an argument."""
        call = getattr(statement, "value", None)
        return (
            isinstance(call, ast.Call)
            and not call.args
            and not call.keywords
            and any(
                self._value(getattr(call.func, "value", call)) is each for each in self._schedulers
            )
        )

    def _check(self, kept: Sequence[ast.stmt]) -> None:
        """Raise :class:`UserCodeError` if statements have other values when they run again."""
        calls = [each for part in kept for each in ast.walk(part) if isinstance(each, ast.Call)]
        functions = {ast.unparse(each.func): self._function(each) for each in calls}
        parts = [*kept, *filter(None, functions.values())]
        own = {id(node) for each in kept for node in ast.walk(each)}
        elsewhere = {
            each.id
            for each in ast.walk(self._loop)
            if isinstance(each, ast.Name)
            and isinstance(each.ctx, ast.Store)
            and id(each) not in own
        }
        unknown = {
            name
            for name in flow(kept)[0] - {self._counter}
            if name in elsewhere or not (name in self._variables or hasattr(builtins, name))
        }
        for each in (node for part in parts for node in ast.walk(part)):
            if isinstance(each, ast.Global | ast.Nonlocal):
                unknown |= {*each.names}
            elif isinstance(each, ast.Attribute) and (
                each.attr in self._changed or isinstance(each.ctx, ast.Store)
            ):
                unknown.add(ast.unparse(each))
        unknown |= {name for name, tree in functions.items() if tree and calls_in([tree]) & _APART}
        if unknown := unknown | (calls_in(kept) & _APART):
            raise UserCodeError(
                f"the loop sets learning rates between epochs by {', '.join(sorted(unknown))}, so "
                "that no function of the epoch is known",
                remedy="let them depend on the epoch only; or pass schedule=… to the session, a "
                "factor for each progress; or compute the rate for each batch from session.epoch "
                "or session.global_step",
            )

    def _changed_attributes(self) -> set[str]:
        """Return the names of attributes that the code of the loop's file changes, other than at
        first."""
        nodes = [*ast.walk(self._tree)]
        repeated = {
            id(node) for each in nodes if isinstance(each, _LOOPS) for node in ast.walk(each)
        }
        first = {
            id(node)
            for each in nodes
            if isinstance(each, ast.FunctionDef) and each.name == "__init__"
            for node in ast.walk(each)
        }
        return {
            each.attr
            for each in nodes
            if isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and (
                id(each) in repeated
                or (id(each) not in first and isinstance(self._value(each), int | float))
            )
        }

    def _value(self, node: ast.AST) -> Any:
        """Return the value of a variable or an attribute before the loop, if it is known."""
        if isinstance(node, ast.Name):
            return self._variables.get(node.id, _UNKNOWN)
        if isinstance(node, ast.Attribute):
            with suppress(Exception):
                return getattr(self._value(node.value), node.attr, _UNKNOWN)
        return _UNKNOWN

    def _function(self, call: ast.Call) -> ast.Module | None:
        """Return the code of a function or method of the user's files that is called."""
        value = self._value(call.func)
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and _is_of_user(value.__code__.co_filename):
            with suppress(OSError):
                return parsed(inspect.getsource(value))
        return None


def _compiled(statements: list[ast.stmt]) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Module(statements, [])), "<loop>", "exec")


def _assigns_rate(node: ast.AST) -> bool:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return isinstance(node, ast.Assign | ast.AugAssign) and any(
        isinstance(each, ast.Subscript) and getattr(each.slice, "value", None) == "lr"
        for each in targets
    )


def _sides(path: Sequence[ast.AST]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the statements before and after the last one of ``path``, in the first one."""
    before: list[ast.stmt] = []
    after: list[ast.stmt] = []
    for outer, inner in pairwise(path):
        for block in (getattr(outer, name, []) for name in ("body", "orelse", "finalbody")):
            if inner in block:
                at = block.index(inner)
                before, after = [*before, *block[:at]], [*block[at + 1 :], *after]
    return before, after


def _file_of(value: object) -> str:
    return getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
