"""Policies by which versions merge buffers: what the task says, or what its first batches show.

Running statistics of torch's normalizations are averaged, and their counters are the largest. For
other buffers, the first worker of a job compares a step with a whole batch to steps with its two
halves: whether the mean of the halves, the sum of their increments, or their largest or smallest
values give the buffer of the whole. If nothing does, as with queues, or with sums that decay, only
whole batches are trained. The mean of directions, as of the power iterations of spectral norm, is
shorter than they are, so a version has those of one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from vcasgd.errors import SpecError
from vcasgd.learning.base import as_real, buffers_of, parameters_of, persistent_names, uncompiled
from vcasgd.learning.draws import random_state, restore_random_state
from vcasgd.learning.layout import BESIDE, TensorKind
from vcasgd.task.task import Task, user_code

#: Kinds of floating-point and integer buffers by the policies of ``Task.buffers``; None: the base.
_POLICIES: dict[str, tuple[TensorKind | None, TensorKind | None]] = {
    "mean": (TensorKind.STATISTIC, None),
    "sum": (TensorKind.SUM, TensorKind.COUNT),
    "max": (TensorKind.MAX, TensorKind.INTEGER),
    "min": (TensorKind.MIN, TensorKind.MIN),
    "latest": (TensorKind.LATEST_FLOAT, TensorKind.LATEST),
    "constant": (None, None),
}


def declared_buffers(task: Task, module: nn.Module) -> tuple[list[str], dict[str, TensorKind]]:
    """Return the names of the buffers in the base, and the kinds of those that the task names."""
    with user_code("base_buffers"):
        constant = list(task.base_buffers(module))
        declared = dict(task.buffers)
    kinds: dict[str, TensorKind] = {}
    named, persistent = buffers_of(module), persistent_names(module)
    for pattern, policy in declared.items():
        found = [name for name in named if name in persistent and fnmatchcase(name, pattern)]
        for name in found:
            kind = _kind_of(name, named[name], policy)
            if kind is None:
                constant.append(name)
            else:
                kinds.setdefault(name, kind)
        if not found:
            raise SpecError(
                f"task: buffers: the model has no persistent buffer {pattern}",
                remedy="use names of module.named_buffers(), or patterns of them",
                field="task",
            )
    return constant, kinds


def _kind_of(name: str, buffer: Tensor, policy: str) -> TensorKind | None:
    kinds = _POLICIES.get(policy)
    floating = as_real(buffer).is_floating_point()
    if kinds is None or (policy == "mean" and not floating):
        known = [each for each in _POLICIES if floating or each != "mean"]
        raise SpecError(
            f"task: buffers: {name} can't be merged by {policy!r}",
            remedy=f"use {', '.join(known)}",
            field="task",
        )
    return kinds[0 if floating else 1]


def unexplained_buffers(module: nn.Module, explained: Container[str]) -> list[str]:
    """Return the names of persistent buffers that aren't ``explained``, nor torch's statistics."""
    usual = {
        uncompiled(f"{prefix}.{name}" if prefix else name)
        for prefix, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for name, _ in layer.named_buffers(recurse=False)
    }
    persistent = persistent_names(module)
    return [
        name
        for name in buffers_of(module)
        if name in persistent and name not in usual and name not in explained
    ]


# -- what the first batches show -----------------------------------------------------------------

#: Largest error of a prediction of a buffer, as a multiple of its change and of its value: what
#: rounding explains; and what a statistic of smaller parts may differ by.
EXACTLY, ROUGHLY = (1e-3, 1e-6), (0.25, 0.02)
#: Kinds that are tried, in this order.
_FLOATING = (TensorKind.STATISTIC, TensorKind.SUM, TensorKind.MAX, TensorKind.MIN)
_WHOLE = (TensorKind.LATEST, TensorKind.COUNT, TensorKind.INTEGER, TensorKind.MIN)


@dataclass(frozen=True)
class StepEffect:
    """A buffer before a step, after one with a whole batch, and after those with its two halves."""

    before: Tensor
    whole: Tensor
    halves: tuple[Tensor, Tensor]


def find_kinds(
    state: nn.Module,
    names: Sequence[str],
    step: Callable[[int, int], None],
    size: int,
) -> tuple[dict[str, TensorKind], list[str]]:
    """Return how versions merge buffers of a model, and the names of those that can't be divided.

    ``step(start, stop)`` trains these of the job's samples as one batch; ``size`` are those of a
    batch. ``state`` is all that a step changes; it has its values again at the end. Buffers that
    the first two steps don't change are in neither, nor are tensors beside the model that each step
    replaces.
    """
    seen: dict[str, list[StepEffect]] = {name: [] for name in names}

    def observe(restore: Callable[[], None]) -> None:
        def after(start: int, stop: int) -> dict[str, Tensor]:
            step(start, stop)
            values = _values(state, names)
            restore()
            return values

        before, whole = _values(state, names), after(0, size)
        halves = after(0, size // 2), after(size // 2, size)
        for name in names:
            pair = halves[0][name], halves[1][name]
            seen[name].append(StepEffect(before[name], whole[name], pair))

    with untouched(state) as restore:
        observe(restore)
        if all(torch.equal(o.before, o.whole) for found in seen.values() for o in found):
            return {}, []
        step(0, size)
        with untouched(state) as restore_second:
            observe(restore_second)
    shares = (size // 2 / size, 1 - size // 2 / size)
    kinds, undivided = {}, []
    for name, found in seen.items():
        if all(torch.equal(each.before, each.whole) for each in found):
            continue
        if (kind := kind_of(found, shares)) is not None:
            kinds[name] = kind
        else:
            undivided.append(name)
    beside = [name for name in undivided if name.startswith(BESIDE)]
    firsts = {name: seen[name][0].whole for name in beside}
    replaced = _replaced(state, firsts, lambda: step(0, size)) if beside else set()
    return kinds, [name for name in undivided if name not in replaced]


def _replaced(state: nn.Module, firsts: Mapping[str, Tensor], step: Callable[[], None]) -> set[str]:
    """Return the names of tensors that a step sets to the same values whatever they were."""
    with untouched(state):
        named = buffers_of(state)
        with torch.no_grad():
            for name in firsts:
                named[name].add_(1)
        step()
        values = _values(state, list(firsts))
    return {name for name, first in firsts.items() if torch.equal(values[name], first)}


def kind_of(found: Sequence[StepEffect], shares: tuple[float, float]) -> TensorKind | None:
    """Return the kind that explains a buffer in all states; None if it depends on whole batches."""
    floating = found[0].whole.is_floating_point()
    if any(each.whole.shape != half.shape for each in found for half in each.halves):
        return None
    if all(_is_direction(each) for each in found):
        return TensorKind.LATEST_FLOAT
    for kind in _FLOATING if floating else _WHOLE:
        if all(_explains(kind, each, shares, EXACTLY) for each in found):
            return kind
    statistic = TensorKind.STATISTIC
    if floating and all(_explains(statistic, each, shares, ROUGHLY) for each in found):
        return statistic
    return None


def _is_direction(seen: StepEffect) -> bool:
    """Return True for a vector of length 1 that follows the parameters, not the samples."""
    values = (seen.before, seen.whole, *seen.halves)
    if seen.whole.ndim != 1 or not seen.whole.is_floating_point():
        return False
    same = all(torch.allclose(seen.whole, half, *EXACTLY) for half in seen.halves)
    return same and all(abs(float(each.double().norm()) - 1) <= EXACTLY[0] for each in values)


def _explains(
    kind: TensorKind, seen: StepEffect, shares: tuple[float, float], most: tuple[float, float]
) -> bool:
    before, whole, first, second = (
        each.double() for each in (seen.before, seen.whole, *seen.halves)
    )
    match kind:
        case TensorKind.SUM | TensorKind.COUNT:
            merged = first + second - before
        case TensorKind.MAX | TensorKind.INTEGER:
            merged = torch.maximum(torch.maximum(first, second), before)
        case TensorKind.MIN:
            merged = torch.minimum(torch.minimum(first, second), before)
        case TensorKind.LATEST:
            # The same on all workers.
            merged = torch.where(first == second, first, torch.nan)
        case _:
            merged = shares[0] * first + shares[1] * second
    if not whole.numel():
        return True
    bound = most[0] * (whole - before).abs().max() + most[1] * whole.abs().max()
    return bool((merged - whole).abs().max() <= bound)


def _values(state: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    buffers = buffers_of(state)
    return {name: as_real(buffers[name]).clone() for name in names}


@contextmanager
def untouched(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Keep a model and all random numbers as they are; layers that would disturb them rest.

    The function gives the model its values again at once.
    """
    trained = {name: each for name, each in parameters_of(module).items() if each.requires_grad}
    kept = {
        name: (each.detach().clone(), each, each._version)
        for name, each in (trained | buffers_of(module)).items()
        if not each.is_inference()
    }

    def restore() -> None:
        with torch.no_grad():
            for name, each in (trained | buffers_of(module)).items():
                if name not in kept:
                    continue
                value, before, version = kept[name]
                # What didn't change keeps its version, by which changes of the base are noticed. A
                # fused optimizer doesn't change those of parameters.
                changed = each.requires_grad or each is not before or each._version != version
                if changed and each.shape == value.shape:
                    each.copy_(value)

    training = [(layer, layer.training) for layer in module.modules()]
    try:
        with same_random_numbers(module):
            rest(module)
            yield restore
    finally:
        for layer, before in training:
            layer.training = before
        restore()


@contextmanager
def same_random_numbers(module: nn.Module) -> Iterator[None]:
    """Keep the random state of torch, on the module's devices, too, of numpy, and of Python."""
    state = random_state()
    gpus = {each.device for each in module.parameters() if each.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(gpus)):
            yield
    finally:
        restore_random_state(state)


def rest(module: nn.Module) -> None:
    """Let layers rest whose result is random, or depends on a batch in a known way."""
    for layer in module.modules():
        if isinstance(layer, _DropoutNd | _BatchNorm | nn.MultiheadAttention | nn.RNNBase):
            layer.training = False
