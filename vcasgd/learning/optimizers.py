"""Optimizers of other forms than torch's: lists of them, closures, and two modes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from vcasgd.errors import SpecError, UserCodeError


class OptimizerList(Optimizer):
    """Several optimizers, whose steps follow each other, as one.

    Each of them keeps its state; this one has none.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([each for part in parts for each in trained_by(part)], {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, which may get more of them."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Nothing: the groups are those of the parts."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Nothing: parts have their groups."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            if closure is not None and takes_closure(part):
                part.step(closure)  # type: ignore[arg-type]
            else:
                part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            load_state(part, state)


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the groups of an optimizer, in their order."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def as_optimizer(given: Any) -> Optimizer:
    """Return an optimizer, or several in a list or tuple, as one. Raises :class:`UserCodeError`."""
    if isinstance(given, list | tuple) and given:
        parts = [_ready(each) for each in given]
        if all(isinstance(each, Optimizer) for each in parts):
            one: Optimizer = parts[0]
            return one if len(parts) == 1 else OptimizerList(parts)
    elif isinstance(given, Optimizer):
        ready: Optimizer = _ready(given)
        return ready
    raise UserCodeError(
        f"the optimizer is a {type(given).__name__}",
        remedy="return a torch.optim.Optimizer, or a list of them",
    )


def _ready(given: Any) -> Any:
    """Return the optimizer whose steps count, with the hooks that torch gives each."""
    if type(given).__module__.partition(".")[0] == "accelerate":
        return given.optimizer
    if isinstance(given, Optimizer) and not hasattr(given, "_optimizer_step_pre_hooks"):
        # A wrapper, such as Lookahead, that doesn't call the constructor of its base class.
        vars(given).setdefault("defaults", {})
        given.__setstate__({})
        # A scheduler has replaced it by one without hooks.
        vars(given).pop("step", None)
    return given


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that keep the state: those of a list, or that inside a wrapper."""
    if isinstance(optimizer, OptimizerList):
        return tuple(inner for part in optimizer.parts for inner in parts_of(part))
    inner = getattr(optimizer, "base_optimizer", None)
    return (inner if isinstance(inner, Optimizer) else optimizer,)


def load_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state. Groups stay the same objects, to which loops, schedules, and wrappers refer."""
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    before = [(one, one.param_groups) for one in (optimizer, *inner)]
    optimizer.load_state_dict(state)
    for one, groups in before:
        for group, loaded in zip(groups, one.param_groups, strict=True):
            group |= loaded
        one.param_groups = groups


State = dict[str, Any]
#: Attributes of every optimizer, which are kept otherwise or are no state.
_OF_TORCH = vars(torch.optim.SGD([torch.zeros(1)])).keys()


def saved(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that gives an optimizer its present state again, as often as it is called.

    Beside the states of parameters, these are settings of groups, attributes, and optimizers in it.
    Groups that were added since have no state.
    """
    attributes = vars(optimizer)
    inner = [saved(each) for value in attributes.values() for each in _optimizers_in(value)]
    parameters = {id(each): each for each in trained_by(optimizer)}
    # A wrapper may have none of its own.
    own: State = getattr(optimizer, "state", {})
    states = {key: _kept(each, parameters, _copied) for key, each in own.items()}
    settings = [
        {name: _kept(each, parameters, _copied) for name, each in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    others = attributes.items()
    kept = {name: _kept(value, parameters) for name, value in others if name not in _OF_TORCH}

    @torch.no_grad()
    def restore() -> None:
        present: State = getattr(optimizer, "state", {})
        present.clear()
        present.update(_values(states))
        for group, fields in zip(optimizer.param_groups, settings, strict=False):
            for name in group.keys() - fields.keys() - {"params"}:
                del group[name]
            group.update(_values(fields))
        for name in attributes.keys() - kept.keys() - _OF_TORCH:
            if _kept(attributes[name], parameters) is not None:
                delattr(optimizer, name)
        for name, value in _values(kept).items():
            setattr(optimizer, name, value)
        for each in inner:
            each()

    return restore


def settings_of(optimizer: Optimizer) -> list[State]:
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else copy.copy(value)
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _optimizers_in(value: Any) -> list[Optimizer]:
    parts = value.values() if isinstance(value, dict) else value
    listed = parts if isinstance(value, list | tuple | dict) else [value]
    return [each for each in listed if isinstance(each, Optimizer)]


#: Returns the value that something had; None for what is no state.
Kept = Callable[[], Any] | None


def _values(kept: Mapping[Any, Kept]) -> dict[Any, Any]:
    return {key: get() for key, get in kept.items() if get is not None}


def _copied(value: Any, parameters: Mapping[int, Tensor]) -> Kept:
    if isinstance(value, nn.Module):
        return lambda: value
    content = copy.deepcopy(value, dict(parameters))
    return lambda: copy.deepcopy(content, dict(parameters))


def _kept(
    value: Any,
    parameters: Mapping[int, Tensor],
    other: Callable[[Any, Mapping[int, Tensor]], Kept] = lambda *_: None,
) -> Kept:
    """Return a function that returns a value as it is now; that of ``other`` for an object.

    Tensors, lists, tuples, and dicts stay the same objects, because others can refer to them.
    ``parameters``, by their ids, stay as they are.
    """
    if value is None or isinstance(value, int | float | str) or id(value) in parameters:
        return lambda: value
    if isinstance(value, Tensor):
        content = value.detach().clone()
        return lambda: value.copy_(content)
    if not isinstance(value, list | tuple | dict):
        return other(value, parameters)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    parts = {key: _kept(value[key], parameters, other) for key in keys}
    if None in parts.values():
        return None

    def restored() -> Any:
        present = _values(parts)
        if isinstance(value, list):
            value[:] = present.values()
        elif isinstance(value, dict):
            value.clear()
            value.update(present)
        return value

    return restored


def name_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer for people."""
    if isinstance(optimizer, OptimizerList):
        return " and ".join(type(part).__name__ for part in optimizer.parts)
    return type(optimizer).__name__


def set_mode(optimizer: Optimizer, *, training: bool) -> None:
    """Put an optimizer that has two modes into one of them.

    A schedule-free one then changes the parameters to those that gradients are computed at, or to
    their average, which is the model (arXiv:2405.15682).
    """
    for part in optimizer.parts if isinstance(optimizer, OptimizerList) else (optimizer,):
        modes = [getattr(part, name, None) for name in ("train", "eval")]
        if all(map(callable, modes)):
            modes[not training]()  # type: ignore[misc]  # checked to be callable


# -- closures --------------------------------------------------------------------------------------


def takes_closure(optimizer: Optimizer) -> bool:
    """Return True if an optimizer may evaluate the loss again, as L-BFGS and SAM do."""
    if isinstance(optimizer, OptimizerList):
        return any(map(takes_closure, optimizer.parts))
    if isinstance(optimizer, LBFGS):
        return True
    step = inspect.unwrap(type(optimizer).step)
    of_torch = step.__module__.startswith("torch.optim")
    return not of_torch and "closure" in inspect.signature(step).parameters


def reevaluates(optimizer: Optimizer) -> bool:
    """Return True if a step computes the gradient several times, as those of L-BFGS and SAM do."""
    if isinstance(optimizer, OptimizerList):
        return any(map(reevaluates, optimizer.parts))
    return isinstance(optimizer, LBFGS) or parts_of(optimizer) != (optimizer,)


def gradient_first(
    optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Compute the gradient that the closure of a step would, so that hooks of the step see it.

    It is a hook of the step: ``args`` begin with the optimizer, and it returns those to use. Does
    nothing without a closure, and for an optimizer that :func:`reevaluates` it.
    """
    closure = args[1] if len(args) > 1 else options.get("closure")
    if closure is None or reevaluates(optimizer):
        return None
    with torch.enable_grad():
        loss = closure()
    others = {name: each for name, each in options.items() if name != "closure"}
    return (optimizer, lambda: loss, *args[2:]), others


class Closure:
    """Loss of a step for its optimizer, with the gradients.

    ``evaluate`` computes both again; None if that isn't possible. It is called only if parameters
    have changed since ``loss``, or gradients were reset: an optimizer that changes gradients and
    passes the closure on to its base class keeps its changes.
    """

    def __init__(
        self, optimizer: Optimizer, loss: float, evaluate: Callable[[], float] | None
    ) -> None:
        self._optimizer, self._evaluate = optimizer, evaluate
        self._note(loss)

    def __call__(self) -> Tensor:
        """Return the loss at the present parameters. Raises :class:`SpecError`."""
        if self._is_outdated:
            if self._evaluate is None:
                raise SpecError(
                    f"task: {name_of(self._optimizer)} computes the loss several times in a step, "
                    "and a script computes it once",
                    remedy="write the training as a vcasgd.Task",
                    field="task",
                )
            with torch.enable_grad():
                self._note(self._evaluate())
        return self._loss

    def _note(self, loss: float) -> None:
        self._loss, self._seen = torch.tensor(loss), self._versions()

    @property
    def _is_outdated(self) -> bool:
        parameters, gradients = self._versions()
        if parameters != self._seen[0] or gradients == self._seen[1]:
            return parameters != self._seen[0]
        present = (each.grad for each in trained_by(self._optimizer))
        return not any(each is not None and bool(each.any()) for each in present)

    def _versions(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return numbers that change with parameters, and those that change with gradients."""
        parameters = trained_by(self._optimizer)
        gradients = [(id(g), g._version) for each in parameters if (g := each.grad) is not None]
        return [each._version for each in parameters], gradients


def check_workers(optimizer: Optimizer, workers: int) -> None:
    """Raise :class:`SpecError` for an optimizer that several workers can't use."""
    if workers > 1 and any(isinstance(part, LBFGS) for part in parts_of(optimizer)):
        raise SpecError(
            "task: LBFGS searches along a line for the loss of a whole batch, and each of several "
            "workers has a part of it",
            remedy="set workers.max: 1, or use another optimizer",
            field="task",
        )
