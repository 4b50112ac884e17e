"""The local loop of a worker: plain PyTorch, one device, no idea that others exist."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from vcasgd.errors import NonFiniteLoss, SpecError, UserCodeError, VcasgdError
from vcasgd.learning.rates import clip
from vcasgd.task.task import Task, calling_user_code


@dataclass(frozen=True)
class Interval:
    """What a stretch of local training did."""

    samples: int
    steps: int
    loss_sum: float  #: over samples; divide by ``samples`` for the mean loss


def build(task: Task, seed: int, device: torch.device | str) -> nn.Module:
    """The task's model on ``device``, the same for every caller with the same seed.

    The random state of torch is as before afterwards. Raises :class:`UserCodeError`.
    """
    gpus = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), _user_code("model"):
        torch.manual_seed(seed)
        model = task.model()
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"model returned a {type(model).__name__}, not a torch.nn.Module")
    return model.to(device)


def seed_for(seed: int, subtask: int, position: int) -> int:
    """A seed in [0, 2⁶³) for the push interval that starts at a subtask's ``position``.

    Whoever trains the interval again after an eviction draws the same dropout masks and
    augmentations.
    """
    words = np.random.SeedSequence([seed, subtask, position]).generate_state(1, np.uint64)
    return int(words[0] >> 1)


def batches(
    task: Task, dataset: Dataset[Any], indices: NDArray[np.int64]
) -> Iterator[tuple[Any, int]]:
    """Batches of ``task.batch_size`` samples in the order of ``indices``, each with its number
    of samples.

    A data set with ``__getitems__`` is asked for a whole batch at once. A lone last sample
    joins the batch before it, for BatchNorm can't train on one sample and none may be left
    out. Raises :class:`UserCodeError`.
    """
    size = _batch_size(task, "batch_size")
    cuts = [*range(0, len(indices), size), len(indices)]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] == 1 < size:
        del cuts[-2]
    groups = [indices[start:stop].tolist() for start, stop in pairwise(cuts)]
    return _load(task, dataset, groups)


def to_device(batch: Any, device: torch.device | str) -> Any:
    """A batch with every tensor in it on ``device``, whatever lists, tuples and mappings they
    are in; anything that knows no device stays as it is."""
    if hasattr(batch, "to"):  # a tensor, a PackedSequence, a tokenizer's BatchEncoding, …
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        named = hasattr(batch, "_fields")
        return type(batch)(*moved) if named else type(batch)(moved)
    return batch


def train(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[tuple[Any, int]],
    device: torch.device | str,
    *,
    should_stop: Callable[[], bool],
    on_step: Callable[[], None],
    before_step: Callable[[int], None] = lambda _: None,
) -> Interval:
    """One local step per batch, until the batches end or ``should_stop`` turns true.

    ``before_step`` is told how many samples came before the step.

    The step at work is always finished, so at least one is made. The training mode of the
    model is left as it is: a layer that the user froze in evaluation mode stays so. Raises
    :class:`NonFiniteLoss` before the parameters are harmed, else :class:`UserCodeError`.
    """
    samples, steps, loss_sum = 0, 0, 0.0
    for batch, count in batches:
        steps += 1
        before_step(samples)
        loss_sum += count * _step(task, model, optimizer, to_device(batch, device), steps)
        samples += count
        on_step()
        if should_stop():
            break
    return Interval(samples, steps, loss_sum)


def evaluate(
    task: Task,
    model: nn.Module,
    dataset: Dataset[Any],
    device: torch.device | str,
    *,
    should_stop: Callable[[], bool],
    on_step: Callable[[], None],
) -> dict[str, float]:
    """The means of the task's metrics over a whole data set, and ``"count"``, its samples.

    Returns nothing, ``{}``, if ``should_stop`` turned true before the end: the mean over a
    part would look like a result. A metric that is not finite is returned as it is. Raises
    :class:`SpecError` if the data set is empty, else :class:`UserCodeError`.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    with torch.no_grad(), _evaluation_mode(model):
        for batch in _everything(task, dataset):
            if should_stop():
                return {}
            for name, value in _metrics(task, model, to_device(batch, device)).items():
                sums[name] += value
            on_step()
    count = sums.pop("count")
    if not count > 0:
        raise UserCodeError(f'evaluate returned "count": {count:g} over the whole data set')
    return {name: value / count for name, value in sums.items()} | {"count": count}


def _step(task: Task, model: nn.Module, optimizer: Optimizer, batch: Any, step: int) -> float:
    """One local step; returns the loss that it started from."""
    optimizer.zero_grad(set_to_none=True)
    with _user_code("loss"):
        loss = task.loss(model, batch)
    return descend(task, optimizer, loss, step)


def descend(task: Task, optimizer: Optimizer, loss: Tensor, step: int) -> float:
    """One step of the optimizer down a mean loss, a scalar with gradient; returns its value.

    ``step`` is the number that an error names. Raises :class:`NonFiniteLoss` before the
    parameters are harmed, else :class:`UserCodeError`.
    """
    with _user_code("loss"):
        value = _scalar(loss)
    # before backward, so that no NaN reaches the parameters or the optimizer's state
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"the loss is {value} in local step {step}",
            remedy="lower the learning rate, clip gradients, or look for NaN in the data",
            step=step,
        )
    with _user_code("backward of the loss"):
        loss.backward()  # type: ignore[no-untyped-call]
    clip(task, optimizer, step)
    with _user_code("optimizer.step"):
        optimizer.step()
    return value


def _scalar(loss: object) -> float:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.item())
    what = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UserCodeError(f"loss returned {what}, not a scalar tensor", remedy="return its mean")


def _batch_size(task: Task, name: str) -> int:
    size = getattr(task, name)
    if not isinstance(size, int) or size < 1:
        raise SpecError(f"task: {name} is {size!r}, not a whole number above 0", field="task")
    return size


def _everything(task: Task, dataset: Dataset[Any]) -> Iterator[Any]:
    with _user_code("dataset"):
        length = len(dataset)  # type: ignore[arg-type]
    if length == 0:
        raise SpecError("task: the validation data set is empty", field="task")
    size = _batch_size(task, "evaluation_batch_size")
    groups = [list(range(length)[cut : cut + size]) for cut in range(0, length, size)]
    return (batch for batch, _ in _load(task, dataset, groups))


def _load(task: Task, dataset: Dataset[Any], groups: list[list[int]]) -> Iterator[tuple[Any, int]]:
    """A batch for each group of indices, with its number of samples."""
    with _user_code("dataset"):
        loader = iter(DataLoader(dataset, batch_sampler=groups, collate_fn=task.collate))
    for group in groups:
        with _user_code("dataset"):
            batch = next(loader)
        yield batch, len(group)


def _metrics(task: Task, model: nn.Module, batch: Any) -> dict[str, float]:
    with _user_code("evaluate"):
        sums = task.evaluate(model, batch)
        if not isinstance(sums, Mapping):
            raise UserCodeError(f"evaluate returned a {type(sums).__name__}, not a dict")
        metrics = {name: float(value) for name, value in sums.items()}
    if "count" not in metrics:
        raise UserCodeError(
            f'evaluate returned no "count", only {", ".join(sorted(metrics)) or "an empty dict"}',
            remedy='return sums over the batch, and under "count" the number of samples in it',
            metrics=sorted(metrics),
        )
    return metrics


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Errors inside are the user's: :class:`UserCodeError` with their traceback."""
    try:
        yield
    except VcasgdError:
        raise
    except Exception as error:
        raise calling_user_code(what, error) from error
