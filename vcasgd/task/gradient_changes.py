"""Statements of a loop that change gradients before a step, which can run again.

As :mod:`vcasgd.task.loop_clips` repeats calls that clip, they run again with the mean gradient of a
round. That is right only if nothing in them differs between workers or lasts from step to step:
statements that read a batch, draw random numbers, or keep a value are left alone.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.While)
#: Calls that only report what they get.
_REPORTS = re.compile(r"print|log|info|debug|warning|write|add_scalar|add_histogram")
#: Calls that mustn't be made again, or have another result each time.
_ONCE = re.compile(
    r"backward|step|zero_grad|super|eval|exec|open|append|appendleft|extend|update|add|insert|pop|"
    r"setdefault|rand\w*|normal_?|bernoulli_?|uniform_|exponential_|multinomial"
)
#: Calls that clip, which :mod:`vcasgd.task.loop_clips` records if nothing else changes gradients.
_CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_gradients"}
#: The one that isn't watched, because it also has another name.
_UNWATCHED = "clip_grads_with_norm_"
#: Methods that return the same numbers as another tensor.
_VIEWS = {"detach", "view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze", "t"}
#: Methods that only reset a gradient.
_RESETS = ("zero_", "detach_")


@dataclass(frozen=True)
class GradientChanges:
    """Statements that change the gradients which the lines ``first`` to ``last`` compute."""

    first: int
    last: int
    statements: Sequence[ast.stmt]
    #: Functions that they call, and that change gradients.
    helpers: Sequence[ast.FunctionDef]

    def nodes(self) -> Iterator[ast.AST]:
        for each in (*self.statements, *self.helpers):
            yield from ast.walk(each)

    def compiled(self, file: str = "<loop>") -> CodeType:
        """Return code that makes the changes. Raises :class:`SyntaxError` if it can't run alone."""
        return compile(ast.Module(list(self.statements), []), file, "exec")


@lru_cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of code, an empty one if it can't be parsed."""
    try:
        return ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def uses_clips(tree: ast.AST) -> bool:
    """Return True if code uses a function that clips, perhaps by another name."""
    imports = (node.names for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    found = (each for names in imports for each in names if each.name in _CLIPS)
    names = _CLIPS | {each.asname or each.name for each in found}
    return any(getattr(node, "attr", getattr(node, "id", None)) in names for node in ast.walk(tree))


def find_changes(
    tree: ast.Module, hooks: Container[str] = (), classes: Container[str] | None = None
) -> list[GradientChanges]:
    """Return the changes of gradients in code that can run again.

    ``hooks`` are names of functions that are called after gradients are computed. Only ``classes``
    of the code run, by default all.
    """
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    helpers = _helpers(tree)
    scopes: list[ast.Module | ast.FunctionDef] = [tree, *functions]
    loops = [each for each in ast.walk(tree) if isinstance(each, _LOOPS)]
    found = [_of_hook(each, helpers) for each in functions if each.name in hooks]
    computing = _computing(tree, functions)
    for scope in scopes:
        for start, span, loop in _spans(scope.body, computing):
            before, makes_step = _before_step(span, computing)
            if not makes_step and (loop or scope is tree or _may_return(before)):
                continue
            around = loop or scope
            setting = [around] if makes_step else [scope, *loops]
            changes = _changes(start, before, helpers)
            if (
                changes
                and _runs_again(changes)
                and _is_all(changes, before, around, setting)
                # If the caller of a function makes the step, it mustn't change gradients.
                and (makes_step or not _changes_elsewhere(changes, tree))
            ):
                found.append(changes)
    others = {
        id(node)
        for each in ast.walk(tree)
        if classes is not None and isinstance(each, ast.ClassDef) and each.name not in classes
        for node in ast.walk(each)
    }
    return [each for each in found if each and id(each.statements[0]) not in others]


def _computing(tree: ast.Module, functions: Iterable[ast.FunctionDef]) -> set[str]:
    """Return the names of calls that compute gradients, and make no step."""
    calls = {each.name: calls_in([each]) for each in functions}
    found = {each for each in calls_in([tree]) if "backward" in each or "closure" in each}
    while True:
        more = {name for name, called in calls.items() if called & found and "step" not in called}
        if more <= found:
            return found
        found |= more


def _helpers(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    return {each.name: each for each in functions if _changes_gradients(each, _derived([each]))}


def _of_hook(
    function: ast.FunctionDef, helpers: dict[str, ast.FunctionDef]
) -> GradientChanges | None:
    """Return the changes that a function makes; None if there are none that can run again."""
    span, _ = _before_step(function.body, ())
    changes = _changes(function, span, helpers)
    if changes is None or _may_return(span) or not _runs_again(changes):
        return None
    # What reports needs to be in the trainer's own call, and a base class may change more.
    own = any(_is_report(each) for each in changes.nodes()) or "super" in calls_in([function])
    return changes if not own and _is_all(changes, span, function, [function]) else None


def gradient_uses(tree: ast.AST) -> list[ast.AST]:
    """Return where code changes gradients, or takes numbers from them.

    Optimizers get the mean gradient, and loops that only reset gradients change nothing.
    """
    apart = {id(each) for node in ast.walk(tree) for each in _of_optimizers_and_resets(node)}
    return [each for each in _uses(tree) if id(each) not in apart]


def hook_changes(tree: ast.Module, name: str, line: int) -> GradientChanges | None:
    """Return the changes that the function ``name`` makes, whose code begins at ``line``.

    Returns None if there are none that can run again.
    """
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    for each in functions:
        first = min([each.lineno, *(part.lineno for part in each.decorator_list)])
        if each.name == name and first == line:
            return _of_hook(each, _helpers(tree))
    return None


# -- where they are --------------------------------------------------------------------------------


def _spans(
    body: list[ast.stmt],
    computing: Container[str],
    after: Sequence[ast.stmt] = (),
    loop: ast.stmt | None = None,
) -> Iterator[tuple[ast.stmt, list[ast.stmt], ast.stmt | None]]:
    """Yield statements that compute gradients, what follows each, and the outermost loop around
    them."""
    for number, each in enumerate(body):
        if isinstance(each, _SCOPES):
            continue
        rest = [*body[number + 1 :], *after]
        blocks = [getattr(each, name, []) for name in ("body", "orelse", "finalbody")]
        if any(blocks):
            inside = loop or (each if isinstance(each, _LOOPS) else None)
            for block in blocks:
                yield from _spans(block, computing, rest, inside)
        elif any(name in computing for name in calls_in([each])):
            yield each, rest, loop


def _before_step(
    statements: Iterable[ast.stmt], computing: Container[str]
) -> tuple[list[ast.stmt], bool]:
    """Return the statements before the next step, and True if there is one.

    There are none if they can't be told apart from it.
    """
    found: list[ast.stmt] = []
    for each in statements:
        if any(name in computing for name in calls_in([each])):
            return [], True
        if isinstance(each, ast.Return):
            break
        if "step" not in calls_in([each]):
            found.append(each)
        elif isinstance(each, ast.If | ast.With):
            inner, makes_step = _before_step(each.body, computing)
            return [*found, *inner], makes_step
        else:
            return (found if isinstance(each, ast.Expr | ast.Assign) else []), True
    return found, False


def _may_return(statements: Iterable[ast.stmt]) -> bool:
    return any(isinstance(n, ast.Return) for each in statements for n in ast.walk(each))


def _changes(
    start: ast.stmt, span: list[ast.stmt], helpers: dict[str, ast.FunctionDef]
) -> GradientChanges | None:
    """Return the statements of a span that change gradients, with what sets their variables."""
    derived = _derived(span)
    chosen: list[ast.stmt] = []
    needed: set[str] = set()
    changing = False
    for each in reversed(span):
        calls = calls_in([each])
        changes = _changes_gradients(each, derived) or bool(calls & {_UNWATCHED, *helpers})
        clips = bool(calls & _CLIPS)
        sets = not isinstance(each, ast.Expr) and needed & names_in(each, ast.Store)
        if changes or clips or sets:
            chosen.insert(0, each)
            needed |= names_in(each, ast.Load) | names_in(each, ast.Store)
        changing |= changes
    if not changing:
        return None
    called: dict[str, ast.FunctionDef] = {}
    while more := calls_in([*chosen, *called.values()]) & helpers.keys() - called.keys():
        called |= {name: helpers[name] for name in more}
    last = start.end_lineno or start.lineno
    return GradientChanges(start.lineno, last, chosen, list(called.values()))


# -- whether they can run again --------------------------------------------------------------------


def _runs_again(changes: GradientChanges) -> bool:
    """Return True if nothing but gradients changes, and nothing is kept or drawn."""
    parts = [*changes.statements, *changes.helpers]
    if any(map(_ONCE.fullmatch, calls_in(parts))):
        return False
    derived = _derived(parts)
    if not all(_is_gradient(node, derived) for each in parts for node in _changed(each)):
        return False
    # A name in a class is another one outside.
    if any(isinstance(n, ast.Attribute) and n.attr.startswith("__") for n in changes.nodes()):
        return False
    try:
        changes.compiled()
    except SyntaxError:
        return False
    return True


def _is_all(
    changes: GradientChanges, span: list[ast.stmt], around: ast.AST, setting: Iterable[ast.AST]
) -> bool:
    """Return True if a loop does nothing else with gradients ``around``, and the changes don't
    depend on what the code of ``setting`` sets."""
    own = {id(node) for node in changes.nodes()}
    free, bound = flow(changes.statements)
    others = [node for each in setting for node in ast.walk(each) if id(node) not in own]
    names = (each for each in others if isinstance(each, ast.Name))
    sets = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    if free & (bound | sets):
        return False
    harmless = {
        id(node)
        for each in ast.walk(ast.Module(span, []))
        if isinstance(each, ast.Assign) or _is_report(each)
        for node in ast.walk(each)
    }
    return all(id(each) in own | harmless for each in gradient_uses(around))


def _changes_elsewhere(changes: GradientChanges, tree: ast.Module) -> bool:
    own, derived = {id(node) for node in changes.nodes()}, _derived([tree])
    return any(id(n) not in own and _is_gradient(n, derived) for n in _changed(tree))


def flow(statements: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the variables that statements read before they set them, and those that they set."""
    free: set[str] = set()
    bound: set[str] = set()
    for each in statements:
        match each:
            case ast.For(target=target, iter=iterable, body=body, orelse=orelse):
                parts: list[ast.AST] = [iterable, target, *body, *orelse]
            case ast.If(test=test, body=body, orelse=orelse):
                parts = [test, *body, *orelse]
            case ast.With(items=items, body=body):
                parts = [*items, *body]
            case _:
                loads = names_in(each, ast.Load)
                if isinstance(each, ast.AugAssign):
                    loads |= names_in(each.target, ast.Store)
                inner = {
                    name
                    for node in ast.walk(each)
                    if isinstance(node, ast.comprehension)
                    for name in names_in(node.target, ast.Store)
                }
                free |= loads - bound - inner
                bound |= names_in(each, ast.Store)
                continue
        needs, sets = flow(parts)
        free |= needs - bound
        bound |= sets
    return free, bound


# -- parts of code ---------------------------------------------------------------------------------


def _uses(node: ast.AST) -> list[ast.AST]:
    nodes = list(ast.walk(node))
    # Such as torch.autograd.grad, whose gradients are no optimizer's.
    functions = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    grads = (n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "grad")
    return [n for n in grads if id(n) not in functions]


def _derived(statements: Iterable[ast.AST]) -> set[str]:
    """Return the variables whose values are gradients, or come from them."""
    pairs = [pair for each in statements for node in ast.walk(each) for pair in _assignments(node)]
    found: set[str] = set()
    while True:
        names = {
            name
            for target, value in pairs
            if _uses(value) or names_in(value, ast.Load) & found
            for name in names_in(target, ast.Store)
        }
        if names <= found:
            return found
        found |= names


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield target, value


def _changes_gradients(statement: ast.AST, derived: set[str]) -> bool:
    return any(_is_gradient(node, derived) for node in _changed(statement))


def _is_gradient(node: ast.AST, derived: set[str]) -> bool:
    return bool(_uses(node) or names_in(node, ast.Load) & derived)


def _changed(statement: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement changes, apart from variables."""
    for node in ast.walk(statement):
        match node:
            case ast.Assign(targets=targets):
                yield from (each for each in targets if not _is_variable(each))
            case ast.AugAssign(target=target) if not _is_variable(target):
                yield target
            case ast.Call(
                func=ast.Attribute(attr=name, value=ast.Name(id="torch")), args=[first, *_]
            ) if _is_in_place(name):
                yield first
            case ast.Call(func=ast.Attribute(attr=name, value=value)) if _is_in_place(name):
                if (receiver := _receiver(value)) is not None:
                    yield receiver
            case ast.keyword(arg="out", value=value):
                yield value


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in _CLIPS


def _receiver(value: ast.expr) -> ast.expr | None:
    """Return what a method in place changes; None for the new tensor of a call."""
    while isinstance(value, ast.Call):
        name = _name(value) or ""
        if not isinstance(value.func, ast.Attribute) or not (_is_in_place(name) or name in _VIEWS):
            return None
        value = value.func.value
    return value


def _is_variable(target: ast.expr) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return all(isinstance(each, ast.Name) for each in parts)


def names_in(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the variables that code reads (``ast.Load``) or sets (``ast.Store``)."""
    nodes = ast.walk(node)
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def calls_in(nodes: Iterable[ast.AST]) -> set[str]:
    found = (n for each in nodes for n in ast.walk(each) if isinstance(n, ast.Call))
    return {name for call in found if (name := _name(call))}


def _is_report(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(_REPORTS.fullmatch(_name(node) or ""))


def _name(call: ast.Call) -> str | None:
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def _of_optimizers_and_resets(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.ClassDef(bases=bases) if any("optim" in ast.dump(b).lower() for b in bases):
            return ast.walk(node)
        case ast.Assign(targets=targets, value=ast.Constant(value=None)):
            return targets
        case ast.Compare(left=left, comparators=[ast.Constant(value=None)]):
            return [left]
        case ast.Attribute(attr=attribute, value=value) if attribute in _RESETS:
            return [value]
    return ()
