"""Local training loop of a worker: plain PyTorch on one device, independent of other workers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError
from vcasgd.learning.batch_weights import BatchWeights
from vcasgd.learning.loader_processes import LoaderProcesses, Request
from vcasgd.learning.optimizers import Closure, takes_closure, trained_by
from vcasgd.learning.precision import StepPrecision, autocast
from vcasgd.learning.rates import clip
from vcasgd.learning.tolerant_loading import TolerantDataset, samples_of, tolerant
from vcasgd.task.task import Task, user_code

if TYPE_CHECKING:
    from vcasgd.learning.bad_samples import BadSamples
    from vcasgd.learning.mean_gradients import MeanGradients


@dataclass(frozen=True)
class Interval:
    """Result of one interval of local training."""

    samples: int
    steps: int
    loss_sum: float  #: Sum over the samples that weren't skipped.
    skipped: int = 0  #: Samples that were left out because they are bad.
    #: Weight of its batches in samples; None if it is the number of the samples that were trained.
    weight: float | None = None


def build(task: Task, seed: int, device: torch.device | str) -> nn.Module:
    """Return the task's model, initialized from the seed, where the task has put it.

    The random state of torch, also on ``device``, is left unchanged. Raises
    :class:`UserCodeError`.
    """
    gpus = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), user_code("model"):
        torch.manual_seed(seed)
        model = task.model()
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"model returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def set_seed(seed: int, device: torch.device | str) -> None:
    """Seed torch's global generators, as far as a model on ``device`` uses them."""
    if torch.device(device).type == "cpu":
        # torch.manual_seed also formats a traceback for each kind of device that isn't used, which
        # takes longer than a small local step.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def step_groups(
    indices: NDArray[np.int64],
    size: int,
    ends: Sequence[int] | None = None,
    batch_size: int = 0,
) -> list[list[int]]:
    """Return the indices of each local step of ``size`` samples, in the order of ``indices``.

    A single last sample joins the previous step, because BatchNorm can't train on one sample and
    no sample may be skipped. If the sampler has batches of its own, which end at ``ends``, each is
    cut into as many equal parts as ``size`` is contained in ``batch_size``.
    """
    if ends is not None:
        parts = max(1, round(batch_size / size))
        return [
            part
            for start, stop in pairwise([0, *ends])
            for part in _parts(indices[start:stop].tolist(), min(parts, (stop - start) // 2))
        ]
    stops = list(accumulate(step_sizes(len(indices), size), initial=0))
    return [indices[start:stop].tolist() for start, stop in pairwise(stops)]


def step_sizes(samples: int, size: int) -> list[int]:
    """Return the number of samples in each local step of :func:`step_groups`."""
    sizes = [min(size, samples - start) for start in range(0, samples, size)]
    if len(sizes) > 1 and sizes[-1] == 1 < size:
        sizes[-2:] = [size + 1]
    return sizes


#: Returns the samples of a local step that this process trains, and the least number that any does.
Part = Callable[[list[int]], tuple[list[int], int]]


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of a local step, loaded one at a time, with their shares of its samples."""

    parts: Iterator[tuple[Any, float]]


def parts_of(batch: Any) -> Iterator[tuple[Any, float]]:
    """Return the micro-batches of a local step's batch, which is a single one by default."""
    return batch.parts if isinstance(batch, MicroBatches) else iter([(batch, 1.0)])


def micro_batches(task: Task, group: list[int], least: int | None = None) -> list[list[int]]:
    """Return the parts of a local step's indices whose gradients are accumulated.

    They have at most ``batch_size / gradient_accumulation_steps`` samples, about equally many, and
    at least 2 because of BatchNorm. A step of fewer samples, as workers of one batch make, has
    fewer parts. ``least`` is the number of samples by which processes that train the step together
    choose the same number of parts; by default, that of ``group``.
    """
    steps = batch_size_of(task, "gradient_accumulation_steps")
    largest, samples = -(-batch_size_of(task) // steps), least or len(group)
    count = max(1, min(-(-samples // largest), samples // 2)) if steps > 1 else 1
    return _parts(group, count)


def _parts(group: list[int], count: int) -> list[list[int]]:
    """Cut a group into ``count`` about equal parts, at least 1."""
    cuts = [len(group) * part // max(count, 1) for part in range(max(count, 1) + 1)]
    return [group[start:stop] for start, stop in pairwise(cuts)]


def gathered(loaded: Iterator[Any], steps: Sequence[Sequence[int]]) -> Iterator[tuple[Any, int]]:
    """Yield each local step's batch with its number of samples.

    ``steps`` has the sizes of each step's micro-batches, which ``loaded`` yields.
    """
    for sizes in steps:
        count = sum(sizes)
        if len(sizes) == 1:
            yield next(loaded), count
        else:
            yield MicroBatches((next(loaded), size / count) for size in sizes), count


def batches_of(
    task: Task,
    dataset: Dataset[Any],
    groups: Sequence[tuple[list[int], int]],
    *,
    skips: bool = False,
) -> Iterator[tuple[Any, int]]:
    """Yield a batch for the indices of each local step, which :data:`Part` returns, in their order.

    Each comes with its number of samples. If the task accumulates gradients, they are
    :class:`MicroBatches`. A data set with ``__getitems__`` gets one call for each micro-batch.
    ``skips``: each is a :class:`~vcasgd.learning.tolerant_loading.LoadedBatch`. Raises
    :class:`UserCodeError`.
    """
    steps = [micro_batches(task, group, least) for group, least in groups]
    loaded = load(task, dataset, [part for parts in steps for part in parts], skips=skips)
    return gathered(loaded, [list(map(len, parts)) for parts in steps])


def prefetched(
    processes: LoaderProcesses, wanted: Sequence[Request], ahead: Iterable[Request] = ()
) -> Iterator[Any]:
    """Yield the batches of ``wanted``, loaded by processes, which continue with those of ``ahead``.

    Raises :class:`UserCodeError`.
    """
    loading = processes.load(wanted, ahead)
    for _ in wanted:
        with user_code("dataset"):
            batch = next(loading)
        yield batch


def train(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[tuple[Any, int]],
    device: torch.device | str,
    *,
    after_step: Callable[[], bool] = lambda: False,
    before_step: Callable[[int], None] = lambda _: None,
    clip_factor: float = 1.0,
    precision: StepPrecision | None = None,
    bad: BadSamples | None = None,
    weights: BatchWeights | None = None,
    mean_gradients: MeanGradients | None = None,
) -> Interval:
    """Make one local step per batch until the batches end, or ``after_step`` returns True.

    ``before_step`` gets the number of samples before the step, and ``clip_factor`` multiplies the
    task's ``clip_norm``. ``precision`` is that of earlier intervals. With ``bad``, batches are
    :class:`~vcasgd.learning.tolerant_loading.LoadedBatch`, and bad samples are left out. With
    ``weights``, batches count by their weight instead of their number of samples. The training
    mode of the model does not change: a layer that the user put in evaluation mode stays there.
    Raises :class:`NonFiniteLoss` before the parameters are affected, and :class:`UserCodeError`.
    """
    samples, steps, loss_sum, skipped, weight = 0, 0, 0.0, 0, 0.0
    precision = precision or StepPrecision(task, device)

    def make(parts: Iterable[tuple[Any, float]]) -> float:
        return make_step(
            *(task, model, optimizer, parts, steps, device, precision, clip_factor),
            weights,
            mean_gradients,
        )

    for batch, count in batches:
        steps += 1
        before_step(samples)
        if bad is None:
            loss, good = make(parts_of(batch)), count
        else:
            loss, good = bad.step(model, optimizer, parts_of(batch), make)
        counted = weights.step if weights is not None and good else float(good)
        loss_sum += counted * loss
        weight += counted
        skipped += count - good
        samples += count
        if after_step():
            break
    return Interval(samples, steps, loss_sum, skipped, None if weights is None else weight)


def batch_size_of(task: Task, name: str = "batch_size") -> int:
    """Return the number of samples in a step of a task. Raises :class:`SpecError`."""
    size = getattr(task, name)
    if not isinstance(size, int) or size < 1:
        raise SpecError(f"task: {name} is {size!r}, not a whole number above 0", field="task")
    return size


def load(
    task: Task, dataset: Dataset[Any], groups: Sequence[Sequence[int]], *, skips: bool = False
) -> Iterator[Any]:
    collate: Any = tolerant(task.collate) if skips else task.collate
    load: Any = TolerantDataset(dataset).__getitems__ if skips else partial(samples_of, dataset)
    for group in groups:
        with user_code("dataset"):
            batch = collate(load(list(group)))
        yield batch


def sound_samples(task: Task, dataset: Dataset[Any], indices: Sequence[int]) -> list[int]:
    """Return those of some samples that can be loaded and go into one batch."""
    (loaded,) = load(task, dataset, [indices], skips=True)
    return list(loaded.indices)


def loaded_once(
    task: Task, dataset: Dataset[Any], groups: Sequence[Sequence[int]]
) -> Callable[[], list[Any]]:
    """Load the samples of the first group, which has those of all; the function makes the batches.

    So data that is augmented, with other numbers each time, is the same in all of them. Both raise
    :class:`UserCodeError`.
    """
    with user_code("dataset"):
        found = samples_of(dataset, list(groups[0]))
    if not isinstance(found, list) or len(found) != len(groups[0]):
        return lambda: list(load(task, dataset, groups))  # A sample isn't known by its index.
    samples = dict(zip(groups[0], found, strict=True))

    def collate() -> list[Any]:
        # A collator may take something out of its samples.
        own = [[_own(samples[index]) for index in group] for group in groups]
        with user_code("collate"):
            return [task.collate(each) for each in own]

    return collate


def _own(sample: Any) -> Any:
    return copy.copy(sample) if isinstance(sample, dict | list) else sample


# -- one local step ------------------------------------------------------------------------------


def make_step(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    parts: Iterable[tuple[Any, float]],
    step: int,
    device: torch.device | str,
    precision: StepPrecision,
    clip_factor: float,
    weights: BatchWeights | None = None,
    mean_gradients: MeanGradients | None = None,
) -> float:
    """Make one local step and return the loss before it, 0 if its batch has no weight.

    ``parts`` are its micro-batches with their shares of its samples.
    """
    task.clip_factor = clip_factor
    if weights is not None:
        weights.begin()
        parts = ((batch, share) for batch, _ in parts if (share := weights.share(batch)))
    if task.makes_steps:
        batch, _ = next(iter(parts), (None, 0.0))
        if batch is None:
            return 0.0
        with user_code("loss"), autocast(task, device):
            return _scalar(task.loss(model, to_device(batch, device)))
    optimizer.zero_grad(set_to_none=True)
    total = 1.0

    def evaluate(parts: Iterable[tuple[Any, float]]) -> float:
        mean = 0.0
        for batch, share in parts:
            with user_code("loss"), autocast(task, device):
                loss = task.loss(model, to_device(batch, device))
            share *= task.loss_factor
            mean += share * backward(loss, step, share, precision)
        return mean

    def evaluate_again() -> float:
        if mean_gradients is not None:
            mean_gradients.give_up()
        optimizer.zero_grad(set_to_none=True)
        mean = evaluate(parts)
        _divide_gradients(optimizer, total)
        clip(task, optimizer, step, clip_factor)
        return mean / total

    closes = takes_closure(optimizer)
    parts = list(parts) if closes else parts
    mean = evaluate(parts)
    if weights is not None:
        total = weights.total
        if not total:
            return 0.0
        _divide_gradients(optimizer, total)
    again = evaluate_again if task.repeats_loss else None
    closure = Closure(optimizer, mean / total, again) if closes else None
    update(task, optimizer, step, precision, clip_factor, mean_gradients, closure)
    return mean / total


def _divide_gradients(optimizer: Optimizer, by: float) -> None:
    if by == 1:
        return
    for gradient in (each.grad for each in trained_by(optimizer) if each.grad is not None):
        gradient.div_(by)


def backward(loss: Tensor, step: int, share: float, precision: StepPrecision) -> float:
    """Add the gradient of a mean loss, a scalar, times ``share``, and return the loss.

    ``step`` is the step's number in error messages. Raises :class:`NonFiniteLoss` before the
    parameters or the optimizer's state are affected, and :class:`UserCodeError`.
    """
    on_gpu = isinstance(loss, Tensor) and loss.is_cuda
    read = _copied_scalar(loss) if on_gpu else partial(_scalar, loss)
    if not on_gpu:
        _check_finite(read, step)
    with user_code("backward of the loss"):
        part = loss if share == 1 else loss * share
        precision.scaled(part).backward()  # type: ignore[no-untyped-call]
    # The GPU computes the gradient meanwhile.
    return _check_finite(read, step)


def _copied_scalar(loss: Tensor) -> Callable[[], float]:
    """Start to copy a scalar from a GPU; the function waits for the copy, not for later work."""
    if loss.numel() != 1:
        return partial(_scalar, loss)
    host = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
    host.copy_(loss.detach(), non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> float:
        copied.synchronize()
        return host.item()

    return wait


def _check_finite(read: Callable[[], float], step: int) -> float:
    with user_code("loss"):
        value = read()
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"the loss is {value} in local step {step}",
            remedy="lower the learning rate, clip gradients, or check the data for NaN",
            step=step,
        )
    return value


def update(
    task: Task,
    optimizer: Optimizer,
    step: int,
    precision: StepPrecision,
    clip_factor: float = 1.0,
    mean_gradients: MeanGradients | None = None,
    closure: Closure | None = None,
) -> None:
    """Clip the gradients and make one step of the optimizer.

    Raises :class:`NonFiniteLoss` and :class:`UserCodeError`.
    """
    may_overflow = precision.scales
    if mean_gradients is not None:
        mean_gradients.capture()
    with user_code("optimizer.step"):
        precision.step(
            optimizer,
            lambda: clip(task, optimizer, step, clip_factor, may_overflow=may_overflow),
            step,
            closure,
        )


def _scalar(loss: object) -> float:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.item())
    value = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UserCodeError(f"loss returned {value}, not a scalar tensor", remedy="return its mean")


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Return a batch with every tensor on ``device``.

    Tensors can be in nested lists, tuples, and mappings. Values without a device stay as they are.
    A tensor in pinned memory is copied while the GPU computes.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):  # a PackedSequence, a tokenizer's BatchEncoding, …
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        named = hasattr(batch, "_fields")
        return type(batch)(*moved) if named else type(batch)(moved)
    return batch
