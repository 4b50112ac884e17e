"""Notes of what a job of several workers does otherwise than one process, found at its start."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import autograd, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import Dataset

from vcasgd.learning import second_moments
from vcasgd.learning.draws import wrapped
from vcasgd.learning.gradient_hooks import are_hooked, step_hooks
from vcasgd.learning.layout import Layout
from vcasgd.learning.local_moments import steps_as
from vcasgd.learning.mean_gradients import MAX_FLOATS
from vcasgd.learning.optimizers import name_of, parts_of
from vcasgd.session.script import LoopInThread
from vcasgd.spec.job import JobSpec
from vcasgd.task.gradient_changes import find_changes, gradient_uses, names_in, parsed
from vcasgd.task.task import Task, source_of

#: Remedy that is always left.
ALONE = "with workers.max 1, the job trains as one process"
#: Text of each kind of event: the difference, with what was found for ``{}``, and its remedy.
_TEXTS = {
    "code-not-run": "{} and what follows don't run when the job ends the loop; vcasgd download "
    "fetches the model, the function of session.evaluation can test it, and vcasgd sweep makes a "
    "job of each setting",
    "buffers-averaged": "{}: each version has the mean of the workers' values, which is not what "
    f"whole batches make of these buffers; {ALONE}",
    "batches-mixed": "{}",
    "steps-in-turn": "the loop computes gradients after the step of another optimizer, which each "
    "worker has made with its part of the batch; the smaller the parts, the more that differs: "
    f"with a larger min_local_batch, fewer workers have larger ones, and {ALONE}",
    "norm-of-parts": "{} normalizes over a worker's part of the batch; set min_local_batch to "
    "batch_size, so that one worker trains whole batches, a larger batch_size, or use layers that "
    "normalize each sample",
    "clip-approximated": "clip_norm clips the gradient of a worker's part of a batch, at a norm "
    "that is larger by the root of the number of parts; the gradient of the whole batch is clipped "
    f"with the default rule and encoding in a model of at most {MAX_FLOATS:,} numbers whose rounds "
    f"have one step, and {ALONE}",
    "loop-clips": f"{{}}; {ALONE}",
    "momentum-starts-again": "a worker that joins later has gathered its momentum after a few "
    "steps, as when training starts",
    "state-starts-again": "a worker that joins later starts with an empty state of {}, as after a "
    "restart; a single Adam or AdamW of torch.optim takes over the second moments of other workers",
    "own-values": "each worker has its own {}, which the code changes from batch to batch, and a "
    "new worker starts again; count by global_step and epoch of the job, and keep tensors, which "
    "travel",
    "own-data": "each worker makes the loop's calls of {} for itself, so workers may have "
    "different data; let set_epoch of the data set, which gets the epoch, do that",
    "hooks-on-workers": "each worker runs {} for its own batches: what they keep is the worker's "
    "own, and starts again with a new worker; keep tensors in the model, whose buffers travel",
}
#: Texts of "batches-mixed": of a sampler, and of an optimizer that takes samples that are alike for
#: larger gradients.
_OWN_BATCHES = (
    "the sampler has batches of its own, and a step of several workers has a part of one batch of "
    "each; set batch: worker, so that each worker trains whole batches, or min_local_batch to "
    "their size, so that one worker trains"
)
_ALIKE = (
    "the samples aren't in a random order, so successive ones, of which each worker has its own, "
    "may be alike, and {} takes that for larger gradients; shuffle them, or set batch: worker, so "
    "that each worker trains whole batches"
)
#: Texts of "loop-clips".
_CLIPS_PARTS = (
    "the loop clips the gradient of a worker's part of a batch, at a norm that is larger by the "
    "root of the number of parts; the gradient of the whole batch is clipped in a model of at most "
    f"{MAX_FLOATS:,} numbers"
)
_CHANGES_PARTS = (
    "backward functions, hooks or the loop get the gradient of a worker's part of a batch: what "
    "they change in proportion to it is as in one process, and what they clamp, normalize, or add "
    "isn't"
)


def approximations(
    spec: JobSpec,
    task: Task,
    layout: Layout,
    optimizer: Optimizer,
    undivided: Sequence[str],
    dataset: Dataset[Any],
    module: nn.Module,
    *,
    mixes: bool = False,
    alike: bool = False,
    in_turn: bool = False,
    normalized: str | None = None,
) -> dict[str, str]:
    """Return what is approximated, each with its remedy, by the kinds of the events that say so.

    ``undivided`` are buffers whose mean isn't what one process has, and ``dataset`` is the training
    set. ``mixes``: workers share the steps, and a sampler has batches of its own. ``alike``:
    successive samples may be alike. ``in_turn``: a loop computes gradients after the step of
    another optimizer. ``normalized`` is a layer that normalizes over what workers share.
    """
    found: dict[str, Any] = {"code-not-run": task.not_run if isinstance(task, LoopInThread) else ""}
    if spec.workers.max > 1:
        adams = any(steps_as(part, Adam, AdamW) for part in parts_of(optimizer))
        misled = alike and adams and not layout.gradients
        mixed = ((mixes, _OWN_BATCHES), (misled, _ALIKE.format(name_of(optimizer))))
        names = [*(each.name for each in layout.entries), *(each.name for each in layout.base)]
        travelling = {*layout.beside, *(name.rpartition(".")[2] for name in names)}
        sources = [task.source(), *sources_of(module)]
        values = own_values(sources, travelling, task.loops, task.repeated_code)
        found |= {
            "buffers-averaged": ", ".join(undivided),
            "batches-mixed": "; ".join(text for holds, text in mixed if holds),
            "steps-in-turn": in_turn,
            "norm-of-parts": normalized,
            "clip-approximated": task.clip_norm is not None and not layout.gradients,
            "loop-clips": _clipped(task, layout, module, optimizer),
            **_lost_state(spec, optimizer),
            "own-values": ", ".join(values),
            "own-data": ", ".join(_changes_of_data(task, dataset)),
            "hooks-on-workers": ", ".join(task.hooks),
        }
    return {kind: _TEXTS[kind].format(what) for kind, what in found.items() if what}


def _clipped(task: Task, layout: Layout, module: nn.Module, optimizer: Optimizer) -> str:
    if task.clips_itself and not layout.gradients:
        return _CLIPS_PARTS
    if _hooks_gradients(task, layout, module, optimizer) or (
        task.makes_steps and _uses_gradients(task, repeats=layout.gradients)
    ):
        return _CHANGES_PARTS
    return ""


def _lost_state(spec: JobSpec, optimizer: Optimizer) -> dict[str, str]:
    """Return what a new worker lacks. Momentum is no reason for another optimizer."""
    if not spec.keeps_optimizer or second_moments.count(optimizer) or not _has_state(optimizer):
        return {}
    momentum = all(steps_as(part, SGD) for part in parts_of(optimizer))
    return {"momentum-starts-again" if momentum else "state-starts-again": name_of(optimizer)}


def _uses_gradients(task: Task, *, repeats: bool) -> bool:
    """Return True if code uses gradients other than in changes that run again if ``repeats``."""
    code, classes = task.loop_code()
    tree = parsed(code)
    changes = find_changes(tree, task.gradient_hooks) if repeats else []
    again = {id(n) for each in changes for n in each.nodes()}
    own = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name in classes]
    parts: list[ast.AST] = [*own] or [tree]
    return any(id(use) not in again for each in parts for use in gradient_uses(each))


#: Code that hooks gradients of what a layer returns.
_HOOKS_OUTPUTS = re.compile(r"def forward\b.*\.register_hook\(", re.DOTALL)


def _hooks_gradients(task: Task, layout: Layout, module: nn.Module, optimizer: Optimizer) -> bool:
    # Hooks are called again for one batch in a step, and not for the sum of several.
    repeats = layout.gradients and task.batches_per_step == 1
    own = not repeats and are_hooked(module.parameters())
    own |= not layout.gradients and bool(step_hooks(optimizer))
    later = any(each._post_accumulate_grad_hooks for each in module.parameters())
    # The smaller a part, the larger the gradient of a sample in the mean of the losses.
    inside = any(each._backward_hooks or each._backward_pre_hooks for each in module.modules())
    inside |= any(".register_hook(" in each for each in task.loops[:1])
    sources = sources_of(module)
    inside |= any(map(_HOOKS_OUTPUTS.search, sources))
    return own or later or inside or _changes_backward([task.source(), *sources])


#: Calls whose result isn't in proportion to what they get.
_UNEVEN = re.compile(
    r"(clamp|clip|norm|normalize|sign|abs|round|sqrt|rsqrt|square|pow|exp|log|tanh|sigmoid|relu"
    r"|softmax|std|var|a?max|a?min|maximum|minimum|quantile|topk|nan_to_num)_?"
)


def _changes_backward(sources: Sequence[str]) -> bool:
    """Return True if code applies functions whose own ``backward`` clamps or normalizes."""
    functions = {each.__name__: each for each in autograd.Function.__subclasses__()}
    used = [each for name, each in functions.items() if f"{name}.apply" in "".join(sources)]
    for each in used:
        with suppress(OSError, TypeError):
            code = parsed(textwrap.dedent(inspect.getsource(each.backward)))
            if any(isinstance(n, ast.FunctionDef) and _is_uneven(n) for n in code.body):
                return True
    return False


def _is_uneven(backward: ast.FunctionDef) -> bool:
    """Return True if a function's result isn't in proportion to its arguments but the first."""
    nodes = list(ast.walk(backward))
    context = {each.arg for each in (backward.args.posonlyargs + backward.args.args)[:1]}
    given = {each.arg for each in nodes if isinstance(each, ast.arg)} - context
    assigns = [each for each in nodes if isinstance(each, ast.Assign)]
    # Once for each, so that one may depend on any other.
    for each in assigns * len(assigns):
        if names_in(each.value, ast.Load) & given:
            given |= {name for target in each.targets for name in names_in(target, ast.Store)}
    operands = filter(None, map(_operand, nodes))
    return any(names_in(each, ast.Load) & given for each in operands)


def _operand(node: ast.AST) -> ast.AST | None:
    """Return the part of an expression that its result isn't in proportion to."""
    match node:
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return None
        case ast.BinOp(left=part, op=ast.Pow()) | ast.BinOp(right=part, op=ast.Div()):
            return part
        case ast.Call() if not _UNEVEN.fullmatch(ast.unparse(node.func).rpartition(".")[2]):
            return None
    return node if isinstance(node, ast.Compare | ast.Call) else None


def sources_of(module: nn.Module) -> list[str]:
    """Return the code of each class of the user's in a model."""
    return [source_of([each]) for each in {type(part): part for part in module.modules()}.values()]


# -- values that code carries from batch to batch -------------------------------------------------

#: Calls of functions and methods that only report what they get.
_REPORTS = re.compile(r"print|log|info|debug|warn|write|set_|append|add_scalar|update|save")
#: Methods of classes that train, apart from those that begin with ``on_``.
_TRAINS = ("forward", "loss", "training_step", "compute_loss")
#: Methods that run at the start, or not in training.
_APART = re.compile(r"__init__|setup|configure|valid|eval|test|predict")


def own_values(
    sources: Iterable[str],
    travelling: Container[str] = (),
    loops: Sequence[str] = (),
    repeated: Container[str] = (),
) -> list[str]:
    """Return names of variables and attributes that training code carries from batch to batch.

    They are changed from their own last value and used for more than a report. ``travelling`` are
    names of what is in each version. ``loops`` is the code of those that train, the innermost
    first, by default all, and ``repeated`` that of statements which have the job's own counts.
    """
    found = {name for each in sources for name in _values_in(each, loops, repeated)}
    return sorted(name for name in found if name.rpartition(".")[2] not in travelling)


def _values_in(source: str, loops: Sequence[str], repeated: Container[str]) -> Iterator[str]:
    tree = parsed(source)
    reset = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "starts_sequence" in ast.dump(node.test)
        for name in _reads(node)
    }
    objects = dict(_objects(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and loops and ast.unparse(node) not in loops:
            continue
        if isinstance(node, ast.For) and _computes(node):
            body = [each for each in node.body if ast.unparse(each) not in repeated]
            yield from _counters(node) & _calculated(body)
        if isinstance(node, ast.For) and (
            ast.unparse(node) == loops[0] if loops else _is_batch_loop(node)
        ):
            changed, used = _flow(node.body)
            for name in changed - reset - _reads(node.target) - _set_first(node.body):
                owner, _, attribute = name.rpartition(".")
                # Methods of the owner may use it.
                if name in used or (owner and attribute in _attributes_outside(node, tree)):
                    yield name
            yield from _appended(node, used)
            owners = {name.partition(".")[0] for name in used}
            yield from (f"{owner}.{each}" for owner in owners for each in objects.get(owner, ()))
        elif isinstance(node, ast.ClassDef):
            methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            if any(name in _TRAINS or name.startswith("on_") for name in methods):
                bodies = [each for name, each in methods.items() if not _APART.search(name)]
                changed, used = _flow(bodies)
                yield from (name for name in changed & used if name.startswith("self."))


def _set_first(body: Sequence[ast.stmt]) -> set[str]:
    """Return the variables that each turn of a loop sets before it reads them."""
    found: set[str] = set()
    read: set[str] = set()
    for each in body:
        if isinstance(each, ast.With):
            found |= _set_first(each.body) - read
        read |= names_in(each, ast.Load)
        if isinstance(each, ast.Assign):
            found |= names_in(each, ast.Store) - read
        elif isinstance(each, ast.AugAssign):
            read |= names_in(each.target, ast.Store)
    return found


def _attributes_outside(loop: ast.For, tree: ast.AST) -> set[str]:
    """Return the attributes that code reads outside of a loop."""
    inside = {id(node) for node in ast.walk(loop)}
    found = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and id(n) not in inside)
    return {node.attr for node in found if isinstance(node.ctx, ast.Load)}


def _objects(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield variables with objects of the code's classes, and what these change in themselves."""
    changing: dict[str | None, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            if methods.keys() & {*_TRAINS, "step"}:
                continue  # an optimizer, or a module, which is looked at for itself
            bodies = [each for name, each in methods.items() if not _APART.search(name)]
            own = sorted(name for name in _flow(bodies)[0] if name.startswith("self."))
            changing[node.name] = [name.removeprefix("self.") for name in own]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for name in filter(None, map(_name, node.targets)):
                yield name, changing.get(_name(node.value.func), [])


#: Methods that add to lists, sets, and queues.
_APPENDS = ("append", "appendleft", "extend", "add")


def _appended(loop: ast.For, used: Container[str]) -> set[str]:
    """Return the containers that a loop adds to, and computes something with that it uses."""
    added: set[str | None] = set()
    read: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            added |= {_name(node.func.value)} if node.func.attr in _APPENDS else set()
        elif isinstance(node, ast.Assign) and any(_name(each) in used for each in node.targets):
            read |= _reads(node.value)
        elif isinstance(node, ast.If) and not _is_report(node):
            read |= _reads(node.test)
    return read & added


def _changes_of_data(task: Task, dataset: Dataset[Any]) -> list[str]:
    """Return the methods of the training set that a loop calls for what they change."""
    data, variables = {id(each) for each in wrapped(dataset)}, task.variables()
    tree = parsed(task.source())
    loops = [each for each in ast.walk(tree) if isinstance(each, ast.For) and _computes(each)]
    found = set()
    for node in (each for loop in loops for each in ast.walk(loop)):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            name, _, inner = (_name(call.func.value) or "").partition(".")
            with suppress(AttributeError, LookupError, ValueError):
                owner = variables[name]()
                # A loader refers to its data set.
                if id(getattr(owner, inner) if inner else owner) in data:
                    found.add(f"{ast.unparse(call.func)}()")
    return sorted(each for each in found if not each.endswith(".set_epoch()"))


def _is_batch_loop(loop: ast.For) -> bool:
    """Return True for an innermost loop that computes gradients."""
    inner = [each for each in ast.walk(loop) if isinstance(each, ast.For) and each is not loop]
    return _computes(loop) and not any(map(_computes, inner))


def _computes(node: ast.AST) -> bool:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    names = {each.attr: _name(each.value) for each in calls if isinstance(each, ast.Attribute)}
    return "backward" in names or names.get("step") == "session"


def _counters(loop: ast.For) -> set[str]:
    """Return the names that a loop counts with: its epochs or its batches."""
    called = _name(loop.iter.func) if isinstance(loop.iter, ast.Call) else None
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    counts = called == "enumerate" or (called == "range" and not _is_batch_loop(loop))
    return {target.id} if counts and isinstance(target, ast.Name) else set()


def _calculated(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that are compared or calculated with, for more than a report."""
    found: set[str] = set()
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.BinOp | ast.Compare):
            found |= _reads(node)
        elif not _is_report(node):
            pending += ast.iter_child_nodes(node)
    return found


def _flow(body: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
    """Return the names that are changed from their own value, and those that are used."""
    changed: set[str] = set()
    used: set[str] = set()
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own = {name for each in targets if (name := _name(each))}
            read = _reads(node.value)
            changed |= own if isinstance(node, ast.AugAssign) else own & read
            used |= read - own
        elif not _is_report(node):
            if name := _name(node):
                used.add(name)
            else:
                pending += ast.iter_child_nodes(node)
    return changed, used


def _is_report(node: ast.AST) -> bool:
    """Return True for a statement that only reports, perhaps now and then, or begins a new mean."""
    if isinstance(node, ast.If):
        return not node.orelse and all(map(_is_report, node.body))
    if isinstance(node, ast.Assign):
        value = node.value
        is_text = isinstance(value, ast.Call) and getattr(value.func, "attr", "") == "format"
        return (
            is_text
            or isinstance(value, ast.Constant | ast.JoinedStr)
            or ast.unparse(value) in ("[]", "{}")
        )
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else _name(call.func) or ""
    return bool(_REPORTS.match(name))


def _reads(node: ast.AST) -> set[str]:
    return {name for each in ast.walk(node) if (name := _name(each))}


def _name(node: ast.AST) -> str | None:
    """Return a variable, or an attribute of one, as text; None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.Call) and _name(node.func) == "getattr" and len(node.args) > 1:
        owner, attribute = _name(node.args[0]), getattr(node.args[1], "value", None)
        return f"{owner}.{attribute}"
    return None


def _has_state(optimizer: Optimizer) -> bool:
    """Return False for SGD without momentum."""
    return not all(
        steps_as(part, SGD) and not any(group["momentum"] for group in part.param_groups)
        for part in parts_of(optimizer)
    )
