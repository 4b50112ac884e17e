"""Tensors that a task or a script keeps beside its model: averages, centres, a loss's parameters.

They are found once, before any training, in the attributes of the task, or in the variables of the
script and of its evaluation, and among the plain attributes of the model's own modules. Each has a
name like :data:`BESIDE` and its path, and is looked up where it is whenever it is read, because
``average[name] = …`` replaces a tensor.

Before any training, the first worker of a job looks at them, and at frozen parameters. What the
optimizer has is trained, now or once it thaws. A copy of trained parameters is an average of them.
Whatever else a few local steps change travels as well, and what stays as it is doesn't.
"""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

import vcasgd
from vcasgd.learning.base import parameters_of
from vcasgd.learning.layout import BESIDE, Layout, TensorKind
from vcasgd.learning.optimizers import trained_by
from vcasgd.task.gradient_changes import parsed
from vcasgd.task.task import Task, is_own

#: Most tensors that are looked at, and levels of containers and objects that they are in.
MAX_TENSORS, MAX_DEPTH = 10_000, 4
#: Values that aren't searched: they have a state of their own, or the data.
_OPAQUE = (
    *(Optimizer, LRScheduler, Dataset, DataLoader, torch.Generator, torch.device),
    *(types.ModuleType, types.FunctionType, types.MethodType, types.FrameType, type),
    *(str, bytes, int, float, complex),
)
#: Attributes of every module.
_MODULE_FIELDS = vars(nn.Module()).keys()

Get = Callable[[], Any]


class Beside:
    """The tensors that were found in ``roots``, values by name, apart from those of ``model``."""

    def __init__(self, roots: Mapping[str, Get], model: nn.Module) -> None:
        self._seen = {id(each) for each in (*model.modules(), *model.parameters())}
        self._seen |= {id(each) for each in model.buffers()}
        #: Modules that were found.
        self.modules: list[nn.Module] = []
        self._places: dict[str, Get] = {}
        for name, get in (*roots.items(), *_plain_attributes(model)):
            self._search(f"{BESIDE}{name}", get, 0)

    def __bool__(self) -> bool:
        return bool(self._places)

    def keep(self, names: Container[str]) -> None:
        """Forget all but these tensors."""
        self._places = {name: get for name, get in self._places.items() if name in names}

    def tensors(self) -> dict[str, Tensor]:
        """Return the present tensors by name; without those that have disappeared."""
        found = {}
        for name, get in self._places.items():
            try:
                value = get()
            except (AttributeError, LookupError, ValueError):
                continue
            if isinstance(value, Tensor):
                found[name] = value
        return found

    def _search(self, name: str, get: Get, depth: int) -> None:
        try:
            value = get()
        except (AttributeError, LookupError, ValueError):
            return  # a cell of a closure can be empty
        if value is None or id(value) in self._seen or len(self._places) >= MAX_TENSORS:
            return
        if isinstance(value, Tensor):
            self._seen.add(id(value))
            if value.layout is torch.strided:
                self._places[name] = get
        elif depth < MAX_DEPTH and not isinstance(value, _OPAQUE):
            self._seen.add(id(value))
            for part, inner in _parts(value):
                self._search(f"{name}.{part}", inner, depth + 1)
            if isinstance(value, nn.Module):
                self.modules.append(value)
                # Modules in it are searched as parts of it.
                self._seen.update(map(id, value.modules()))


def _parts(value: Any) -> Iterator[tuple[str, Get]]:
    if isinstance(value, nn.Module):
        for name, _ in (*value.named_parameters(), *value.named_buffers()):
            yield name, _attribute(value, name)
    elif isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str | int):
                yield str(key), lambda key=key: value[key]  # type: ignore[misc]
    elif isinstance(value, list | tuple):
        for number in range(len(value)):
            yield str(number), lambda number=number: value[number]  # type: ignore[misc]
    elif is_own(value):
        for name in vars(value):
            yield name, lambda name=name: vars(value)[name]  # type: ignore[misc]


def _plain_attributes(model: nn.Module) -> Iterator[tuple[str, Get]]:
    """Yield what the user's own modules keep besides parameters, buffers, and other modules."""
    for path, module in model.named_modules():
        if is_own(module):
            # In the order of the code, which is the same on all machines.
            for name in vars(module):
                if name not in _MODULE_FIELDS:
                    yield f"{path}.{name}".lstrip("."), partial(vars(module).__getitem__, name)


def _attribute(module: nn.Module, name: str) -> Get:
    owner, _, last = name.rpartition(".")
    return lambda: getattr(module.get_submodule(owner), last)


class WholeState(nn.Module):
    """A model with the tensors beside it, whose names begin with :data:`BESIDE`, as its buffers."""

    def __init__(self, model: nn.Module, beside: Beside) -> None:
        super().__init__()
        # Not as a submodule, whose names would have a prefix.
        self._parts = model, beside

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._parts[0].named_parameters(*args, **options)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self._parts[0].named_buffers(*args, **options)
        yield from self._parts[1].tensors().items()

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self._parts[0].state_dict(*args, **options)


# -- what travels ---------------------------------------------------------------------------------

#: Largest state that is looked at, as a multiple of the trained parameters, and further elements.
#: Averages and centres are smaller, data and the base of an adapter larger.
MAX_MULTIPLE, MAX_MORE = 4, 1 << 20
#: Code that lets frozen parameters be trained.
_THAWS = re.compile(r"requires_grad_\(\s*(True)?\s*\)|requires_grad\s*=\s*True|unfreeze|thaw")
#: Names of parameters of adapters, whose base stays frozen.
_ADAPTERS = re.compile(r"lora|adapter", re.IGNORECASE)


class StateSearch:
    """State that may have to travel besides the tensors in ``layout``."""

    def __init__(self, task: Task, module: nn.Module, layout: Layout) -> None:
        self._task = task
        self._most = MAX_MULTIPLE * layout.parameters + MAX_MORE
        trained = {e.name for e in layout.entries if e.kind is TensorKind.PARAMETER}
        tensors = parameters_of(module)
        self._trained = {name: tensors[name] for name in trained}
        kept = _kept_weights(task.source())
        roots = {name: get for name, get in task.variables().items() if name not in kept}
        self.beside = Beside(roots, module)
        frozen = {name: each for name, each in tensors.items() if not each.requires_grad}
        adapted = any(map(_ADAPTERS.search, trained))
        self._frozen = {} if adapted else {n: t for n, t in frozen.items() if _is_float(t)}
        #: Tensors by name of which some may have to travel.
        self.options: dict[str, Tensor] = {**self._frozen, **self.beside.tensors()}
        self._before: dict[str, Tensor] = {}
        self._changed: set[str] = set()

    def trained(self, optimizer: Any) -> dict[str, bool]:
        """Return the names of what an optimizer, or several, will train, each with True."""
        owned = {id(each) for each in _parameters_of(optimizer)}
        found = {name: True for name, each in self.options.items() if id(each) in owned}
        size = sum(each.numel() for each in self._frozen.values())
        if 0 < size <= self._most and _THAWS.search(self._task.source()):
            found |= dict.fromkeys(self._frozen, True)
        return found

    def is_unclear(self, known: Mapping[str, bool]) -> bool:
        """Return True if local steps have to show which of the other tensors change."""
        return bool(self._others(known).keys() - self.copies(known))

    def note(self) -> None:
        """Note the present values."""
        self._before = {name: each.detach().clone() for name, each in self._others({}).items()}

    def undo(self) -> None:
        """Find out what has changed since :meth:`note`, and give it its values again."""
        present = {**self._frozen, **self.beside.tensors()}
        for name, before in self._before.items():
            after = present.get(name)
            if after is None or after.shape != before.shape or after.dtype != before.dtype:
                self._changed.discard(name)
                continue
            if not torch.equal(after.detach(), before):
                if bool(before.isfinite().all()):
                    # A version can't have infinite values, as the least loss has at first.
                    self._changed.add(name)
                with torch.no_grad():
                    after.copy_(before)

    def has_batches(self, sizes: Container[int]) -> bool:
        """Return True if what has changed may only be made of a batch with one of these sizes."""
        shapes = [self._before[name].shape for name in self._changed]
        return any(shape[0] in sizes for shape in shapes if shape)

    def moved(self, known: Mapping[str, bool]) -> dict[str, bool]:
        """Return the names of the others that travel, each with False."""
        return dict.fromkeys(sorted(self.copies(known) | self._changed - known.keys()), False)

    def _others(self, known: Mapping[str, bool]) -> dict[str, Tensor]:
        """Return tensors that may change; a data set that the task keeps is larger."""
        others = {name: each for name, each in self.options.items() if name not in known}
        return {name: each for name, each in others.items() if each.numel() <= self._most}

    def copies(self, known: Mapping[str, bool]) -> set[str]:
        """Return the names of copies of trained parameters, and of what is beside them."""
        others = self._others(known)
        owners = {_owner(name) for name, each in others.items() if self._is_copy(name, each)}
        return {name for name, each in others.items() if _owner(name) in owners and _is_float(each)}

    def _is_copy(self, name: str, tensor: Tensor) -> bool:
        if not _is_float(tensor) or not tensor.numel():
            return False
        # Constant tensors, such as biases of 0, may be equal by accident.
        constant = bool((tensor == tensor.flatten()[0]).all())
        return any(
            tensor.shape == each.shape and torch.equal(tensor.detach().to(each), each.detach())
            for trained, each in self._trained.items()
            if not constant or name.endswith(f".{trained}")
        )


def _kept_weights(source: str) -> set[str]:
    """Return variables that get copies of weights, which code only loads or saves.

    Averages are changed, or computed from themselves.
    """
    nodes = list(ast.walk(parsed(source)))
    calls = (each for each in nodes if isinstance(each, ast.Call))
    unchanged = {
        id(part)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("load_state_dict", "save")
        for part in ast.walk(call)
    }
    kept: set[str] = set()
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign):
            names = (each.id for each in _names_in(node.targets))
            (kept if "state_dict" in ast.unparse(node.value) else used).update(names)
        elif isinstance(node, ast.AugAssign):
            used |= {each.id for each in _names_in([node.target])}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used |= {node.id} if id(node) not in unchanged else set()
    return kept - used


def _names_in(nodes: Iterable[ast.AST]) -> Iterator[ast.Name]:
    parts = (part for node in nodes for part in ast.walk(node))
    return (part for part in parts if isinstance(part, ast.Name))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_inference()


def _parameters_of(optimizer: Any) -> Iterator[Tensor]:
    for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if isinstance(one, Optimizer):
            yield from trained_by(one)


# -- variables of a script ------------------------------------------------------------------------

#: Frames above the loop that are looked at.
MAX_FRAMES = 20
_PACKAGE = str(Path(vcasgd.__file__).parent)


def variables_of_callers(evaluation: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Return functions that return the present values of variables, by name.

    The variables are those of the user's functions that called this one, of their modules, and of
    the closure of the ``evaluation``.
    """
    found: dict[str, Callable[[], Any]] = {}
    for frame in _frames():
        for name in frame.f_locals:
            found.setdefault(name, lambda frame=frame, name=name: frame.f_locals[name])  # type: ignore[misc]
        for name in frame.f_globals:
            found.setdefault(name, lambda frame=frame, name=name: frame.f_globals[name])  # type: ignore[misc]
    names = getattr(getattr(evaluation, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(evaluation, "__closure__", None) or (), strict=True):
        found.setdefault(name, lambda cell=cell: cell.cell_contents)  # type: ignore[misc]
    return {name: get for name, get in found.items() if not name.startswith("__")}


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the user's code that called this, the innermost one first."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith("<frozen"):
            return
        yield frame
        frame = frame.f_back
