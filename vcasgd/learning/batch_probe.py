"""Measurements of a job's batches that its first worker makes before any training.

Whether workers can share a batch depends on its loss. The probe compares the loss of the first
batch with those of its parts: if their mean by samples, or their sum, is the loss, each worker can
take a part. If their mean by the number of some labels is, parts count by that. Otherwise, such as
with contrastive losses, only whole batches are trained.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.learning.batch_weights import (
    MAX_CLASSES,
    Classes,
    CountedLabels,
    counted_labels,
    declared_weight,
)
from vcasgd.learning.buffers import rest, untouched
from vcasgd.learning.local_batch import MIN_BATCH, MIN_NORMALIZED, Division
from vcasgd.learning.optimizers import OptimizerList
from vcasgd.learning.precision import autocast
from vcasgd.learning.rates import set_options
from vcasgd.learning.training import batch_size_of, loaded_once, set_seed, to_device
from vcasgd.task.task import Task

log = logging.getLogger(__name__)

#: Parts of the batch, each of at least :data:`MIN_BATCH` samples, and least samples to divide.
PARTS, MIN_SAMPLES = 8, 4
#: Relative difference of losses that is rounding; that from which on parts can't stand for their
#: batch; and the same in 16 bits, and of losses with random numbers.
ROUNDING, DIFFERENT, DIFFERENT_16, DIFFERENT_RANDOM = 2e-5, 1e-3, 2e-2, 0.03
#: Standard deviation of what is added to parameters beside their own.
SHAKE = 0.05
#: Times that a loss with random numbers is measured, and standard errors that are no difference.
REPEATS, ERRORS = 6, 4.0
#: Why parts of a batch can't stand for it if their losses add up.
SUM = "its loss is a sum over samples; divide it by their number"
#: Pairs of gradients of such a loss that are compared, the largest relative difference of a batch's
#: to that of its parts, and most numbers of a gradient.
PAIRS, DIFFERENT_GRADIENT, MAX_GRADIENT = 6, 0.1, 10_000_000


def division_of(task: Task, module: nn.Module) -> Division:
    """Return how small a part of a batch may be: what the task says, or else what its layers need.

    Raises :class:`~vcasgd.errors.SpecError` for an invalid ``min_local_batch``.
    """
    batch_size = batch_size_of(task)
    if task.min_local_batch is not None:
        least = batch_size_of(task, "min_local_batch")
        return Division(min(least, batch_size), "the task sets min_local_batch")
    layer = normalized(module)
    if layer is not None:
        least, why = MIN_NORMALIZED, f"{layer} normalizes over the batch"
    else:
        least, why = MIN_BATCH, ""
    return Division(min(least, batch_size), why)


def probed(
    task: Task,
    module: nn.Module,
    dataset: Dataset[Any],
    indices: Sequence[int],
    device: torch.device | str,
    *,
    state: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> Division:
    """Return :func:`division_of` after a look at the loss of the samples ``indices``.

    They are the first batch, or micro-batch. The model, random numbers, and the task's attributes
    stay as they are, but for variables of a loop, which gets the batch and its parts. Its steps
    have the learning rate 0, and ``state``, all that they may change, has its values again after
    each. A loss that fails is left to the training.
    """
    division = division_of(task, module)
    given = task.min_local_batch is not None
    # A compiled model would be compiled again for each size.
    compiled = any("_orig_mod" in name for name, _ in module.named_parameters())
    if given or compiled or len(indices) < MIN_SAMPLES:
        return division
    in_turn: set[Optimizer] = set()
    try:
        if task.makes_steps and optimizer is not None:
            with _without_steps(task, optimizer), _steps_in_turn(task, optimizer, in_turn):
                finding = _find(task, module, dataset, indices, device, state or module)
        else:
            own = copy(task) if task.repeats_loss else task
            finding = _find(own, module, dataset, indices, device)
    except Exception as error:  # noqa: BLE001 - user code
        log.debug("the loss of the first batch can't be measured: %r", error)
        return division
    if isinstance(finding, str):
        return Division(batch_size_of(task), finding, sums=finding == SUM)
    return Division(division.least, division.why, finding, in_turn=bool(in_turn))


@dataclass(frozen=True)
class _Losses:
    """Loss of a whole batch and of its parts, each several times.

    ``drawn``: batches of the same samples differ, such as in what a collator masks.
    """

    whole: list[float]
    parts: list[list[float]]
    drawn: bool = False

    def difference(self, weights: Sequence[float], total: float | None = None) -> float:
        """Return the relative difference of the whole to the mean of the parts with these weights,
        whose ``total`` is 1 for their sum; 0 if it can be random."""
        total = sum(weights) if total is None else total
        if not total > 0:
            return math.inf
        differences = [
            whole - sum(w * each for w, each in zip(weights, parts, strict=True) if w) / total
            for whole, parts in zip(self.whole, self.parts, strict=True)
        ]
        difference = abs(fmean(differences))
        if len(differences) > 1:
            error = stdev(differences) / math.sqrt(len(differences))
            difference = 0.0 if difference <= ERRORS * error else difference
        relative = difference / max(*map(abs, self.whole), 1e-30)
        return math.inf if math.isnan(relative) else relative

    @property
    def is_random(self) -> bool:
        return len(self.whole) > 1

    def hides(self, sizes: Sequence[float]) -> bool:
        """Return True if other parameters may show a difference: parts of these ``sizes`` have
        equal losses, or a mean that isn't quite their batch's, as one over some of the samples."""
        equal = all(_same(self.whole[0], each) for each in self.parts[0])
        return equal or (not self.is_random and ROUNDING < self.difference(sizes) <= DIFFERENT)

    @property
    def text(self) -> str:
        means = fmean(fmean(parts) for parts in self.parts)
        return f"{fmean(self.whole):.4g} for the first batch, {means:.4g} for the mean of its parts"


def _find(
    task: Task,
    module: nn.Module,
    dataset: Dataset[Any],
    indices: Sequence[int],
    device: torch.device | str,
    state: nn.Module | None = None,
) -> str | CountedLabels | None:
    """Return the reason why a batch can't be divided, or the labels by which parts count.

    With ``state``, the loss makes steps, which are undone.
    """
    most = min(PARTS, len(indices) // MIN_BATCH)
    cuts = [len(indices) * part // most for part in range(most + 1)]
    groups = [list(indices[start:stop]) for start, stop in pairwise(cuts)]

    with untouched(module) as restore, _noted_classes() as classes:
        set_seed(0, device)
        collate = loaded_once(task, dataset, [list(indices), *groups])
        whole, *parts = collate()
        if task.repeats_loss:
            _shake(module)
            if not math.isfinite(_loss(task, module, whole, device, 0)):
                restore()
        losses = _measured(task, module, collate, device, state)
        sizes = [float(len(each)) for each in groups]
        if not task.repeats_loss and isinstance(losses, _Losses) and losses.hides(sizes):
            # Not at first, because loops keep averages of the parameters.
            _shake(module)
            losses = _measured(task, module, collate, device, state)
        if not isinstance(losses, _Losses):
            return losses
        halves = {torch.bfloat16, torch.float16} & {each.dtype for each in module.parameters()}
        bound = DIFFERENT_16 if halves or task.mixed_precision else DIFFERENT
        ways = counted_labels(whole, classes)
        found = _judged(task, losses, ways, parts, sizes, bound)
        if found in (None, SUM) and task.repeats_loss and losses.is_random and not losses.drawn:
            weights = _declared(task, parts) or sizes
            total = sum(weights)
            factors = [1.0 if found == SUM else each / total for each in weights]
            weighed = list(zip(parts, factors, strict=True))
            if _gradients_differ(task, module, whole, weighed, device):
                return "the gradient of its first batch isn't the mean of those of its parts"
    return found


def _loss(
    task: Task, module: nn.Module, batch: Any, device: torch.device | str, seed: int
) -> float:
    set_seed(seed, device)
    with autocast(task, device):
        return float(task.loss(module, to_device(batch, device)).detach())


def _measured(
    task: Task,
    module: nn.Module,
    collate: Callable[[], list[Any]],
    device: torch.device | str,
    state: nn.Module | None,
) -> _Losses | str | None:
    """Return the losses of a batch and its parts; a text if those have none, None if it has none.

    ``collate`` makes them. ``state`` has its values again after each.
    """

    def draw(number: int) -> list[Any]:
        set_seed(number, device)
        return collate()

    kept: AbstractContextManager[Any] = nullcontext(lambda: None)
    with kept if state is None else untouched(state) as undo:

        def loss(batch: Any, seed: int) -> float:
            value = _loss(task, module, batch, device, seed)
            undo()
            return value

        drawn = [draw(0), draw(1)]
        first = [loss(batches[0], 0) for batches in drawn]
        if not math.isfinite(first[0]):
            return None
        differ = not _same(*first)
        is_random = differ or _is_random(module, lambda seed: loss(drawn[0][0], seed))
        try:
            found = []
            for number in range(REPEATS if is_random else 1):
                batches = list(enumerate(draw(number) if differ else drawn[0], 100 * number))
                # Every other time backwards, so that a loss that changes from call to call, because
                # the code counts them, differs as much for the whole as for its parts.
                order = slice(None, None, -1 if number % 2 else 1)
                found.append([loss(batch, seed) for seed, batch in batches[order]][order])
            return _Losses([each[0] for each in found], [each[1:] for each in found], differ)
        except Exception as error:  # noqa: BLE001 - user code
            return f"its loss needs whole batches: {type(error).__name__}: {error}"


def _is_random(module: nn.Module, loss: Callable[[int], float]) -> bool:
    """Return True if a loss depends on the seed, also in evaluation mode, which remains if not."""
    if _same(loss(0), loss(1)):
        return False
    # Dropout that isn't a layer, for example.
    module.eval()
    if _same(loss(0), loss(1)):
        return False
    rest(module.train())
    return True


def _judged(
    task: Task,
    losses: _Losses,
    ways: Iterable[CountedLabels],
    parts: Sequence[Any],
    sizes: Sequence[float],
    most: float,
) -> str | CountedLabels | None:
    """Do what :func:`_find` does with the losses of parts of these ``sizes``, which may differ by
    ``most``. ``ways`` are those to count labels."""
    weights, is_random = _declared(task, parts), losses.is_random
    difference = losses.difference(weights or sizes)
    if difference > ROUNDING and not weights and not is_random:
        found = [
            (losses.difference([labels.count(part) for part in parts]), number, labels)
            for number, labels in enumerate(ways)
        ]
        if found and min(found)[0] <= ROUNDING:
            return min(found)[2]
    noise = DIFFERENT_RANDOM if is_random else 0.0
    if difference <= max(most, noise):
        return None
    # In 16 bits, a sum is rounded as much as parts may differ.
    rounding = ROUNDING if most == DIFFERENT else most
    if not weights and losses.difference([1.0] * len(parts), 1.0) <= max(rounding, noise):
        return SUM
    return f"its loss isn't a mean over samples: {losses.text}"


@contextmanager
def _noted_classes() -> Iterator[set[Classes]]:
    """Note which label cross-entropies leave out, and the weights that they give to classes.

    All functions and modules of torch call these two, in any thread.
    """
    owner: Any = torch._C._nn
    noted: set[Classes] = set()

    def noting(function: Any, *args: Any) -> Any:
        _, _, weights, _, ignored, *_ = args
        if weights is None or len(weights) <= MAX_CLASSES:
            noted.add((ignored, () if weights is None else tuple(weights.tolist())))
        return function(*args)

    before = {name: getattr(owner, name) for name in ("cross_entropy_loss", "nll_loss_nd")}
    try:
        for name, function in before.items():
            setattr(owner, name, partial(noting, function))
        yield noted
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


def _declared(task: Task, parts: Sequence[Any]) -> list[float]:
    """Return the weights of parts; none unless the task declares those of all."""
    declared = [declared_weight(task, part) for part in parts]
    weights = [weight for weight in declared if weight is not None]
    return weights if len(weights) == len(parts) else []


def _gradients_differ(
    task: Task,
    module: nn.Module,
    whole: Any,
    parts: Sequence[tuple[Any, float]],
    device: torch.device | str,
) -> bool:
    """Return True if the gradient of a loss with random numbers isn't that of its parts.

    ``parts`` have their factors in it. Noise can hide that in the loss, but not in all of the
    numbers of a gradient: the product of two independent differences is 0 on average if only noise
    differs.
    """
    parameters = [each for each in module.parameters() if each.requires_grad]
    if sum(each.numel() for each in parameters) > MAX_GRADIENT:
        return False
    seeds = count(1)

    def gradient(weighed: Sequence[tuple[Any, float]]) -> Tensor:
        mean = torch.zeros((), device=device)
        for batch, weight in weighed:
            set_seed(next(seeds), device)
            with torch.enable_grad(), autocast(task, device):
                loss = task.loss(module, to_device(batch, device))
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            zeros = (torch.zeros_like(each) for each in parameters)
            known = (zero if g is None else g for g, zero in zip(found, zeros, strict=True))
            mean = mean + torch.cat([each.flatten().float() for each in known]) * weight
        return mean

    products, lengths = [], []
    for _ in range(PAIRS):
        first, second = gradient([(whole, 1.0)]), gradient([(whole, 1.0)])
        lengths.append(float(first @ second))
        products.append(float((first - gradient(parts)) @ (second - gradient(parts))))
    error = stdev(products) / math.sqrt(PAIRS)
    return fmean(products) > max(ERRORS * error, DIFFERENT_GRADIENT**2 * fmean(lengths))


@contextmanager
def _without_steps(task: Task, optimizer: Optimizer) -> Iterator[None]:
    """Let a loop's steps change nothing, and a loss that isn't finite be none of its errors."""
    groups = optimizer.param_groups
    rates, skips = [group.get("lr") for group in groups], task.skips_bad_samples
    rates = [each.clone() if isinstance(each, Tensor) else each for each in rates]
    task.skips_bad_samples = True
    try:
        for group, rate in zip(groups, rates, strict=True):
            set_options(group, {} if rate is None else {"lr": 0.0})
        yield
    finally:
        task.skips_bad_samples = skips
        for group, rate in zip(groups, rates, strict=True):
            set_options(group, {} if rate is None else {"lr": rate})


@contextmanager
def _steps_in_turn(task: Task, optimizer: Optimizer, found: set[Optimizer]) -> Iterator[None]:
    """Add to ``found`` the optimizers that get a gradient after the step of another one, in the
    same batch."""
    parts = optimizer.parts if isinstance(optimizer, OptimizerList) else ()
    stepped: set[Optimizer] = set()

    def loss(model: nn.Module, batch: Any) -> Any:
        stepped.clear()
        return type(task).loss(task, model, batch)

    def note(part: Optimizer) -> None:
        if stepped - {part}:
            found.add(part)

    hooks: list[Any] = []
    for part in parts:
        hooks.append(part.register_step_post_hook(lambda stepping, *_: stepped.add(stepping)))
        hooks += [
            each.register_post_accumulate_grad_hook(lambda _, of=part: note(of))
            for group in part.param_groups
            for each in group["params"]
            if each.requires_grad
        ]
    vars(task)["loss"] = loss
    try:
        yield
    finally:
        del vars(task)["loss"]
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _shake(module: nn.Module) -> None:
    """Give parameters other values, because those of new layers can make all losses equal."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.numel() > 1:
            parameter.add_(torch.randn_like(parameter), alpha=float(parameter.std()) + SHAKE)


def _same(first: float, second: float) -> bool:
    return abs(first - second) <= ROUNDING * abs(first)


def normalized(module: nn.Module) -> str | None:
    """Return the type and name of a layer that normalizes over the batch; None without one."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            return f"{type(layer).__name__} {name}"
    return None
