"""Train a :class:`vcasgd.Task` in an ordinary PyTorch loop, to compare with.

Nothing here is vcasgd's own, except for the seeded order of the samples: with the same seed, all
runs of a task start from the same model and see the samples in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from order import order
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import vcasgd

Point = dict[str, Any]


@dataclass
class Training:
    """Result: one point for each epoch, and why it ended early, if it did."""

    points: list[Point] = field(default_factory=list)
    divergence: str | None = None


def train(
    task: vcasgd.Task,
    epochs: int,
    seed: int,
    *,
    machines: int = 1,
    rate: float = 1.0,
    rank: int | None = None,
    on_point: Callable[[Point], None] = lambda _: None,
) -> Training:
    """Train in one process.

    Several ``machines`` are synchronous data parallelism: in each step every machine has a batch
    of its own, so that one process with their common batch makes the same step. (BatchNorm
    measures the common batch, as SyncBatchNorm does.) With a ``rank``, this process is one of
    them, and shares each step with the others through torch.distributed; the first one evaluates.
    ``rate`` multiplies the learning rate.
    """
    torch.manual_seed(seed)
    model = task.model()
    shared = model if rank is None else DistributedDataParallel(model)
    optimizer = task.optimizer([each for each in model.parameters() if each.requires_grad])
    rates = [(group, group["lr"] * rate) for group in optimizer.param_groups]
    data, validation = task.dataset("train"), task.dataset("validation")
    samples = len(data)  # type: ignore[arg-type]  # map-style data sets have a length
    total = samples * epochs
    done, result, started = 0, Training(), time.monotonic()
    for epoch in range(1, epochs + 1):
        for indices in batches(samples, epoch, seed, task.batch_size * machines):
            for group, full in rates:
                group["lr"] = full * task.schedule(done / total)
            own = indices if rank is None else part_of(indices, rank, machines)
            loss = step(task, shared, optimizer, load(task, data, own))
            if not math.isfinite(loss):
                result.divergence = f"the loss is {loss} after {done} samples"
                return result
            done += len(indices)
        if rank:
            continue
        metrics = evaluate(task, model, validation)
        seconds = round(time.monotonic() - started, 3)
        result.points.append(
            {"epoch": epoch, "seconds": seconds, "samples": done, "metrics": metrics}
        )
        on_point(result.points[-1])
    return result


def batches(samples: int, epoch: int, seed: int, size: int) -> Iterator[list[int]]:
    """Yield the indices of each batch; a single last sample joins the previous batch."""
    indices = order(samples, seed, epoch)
    cuts = [*range(0, samples, size), samples]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] == 1:
        del cuts[-2]
    for start, stop in pairwise(cuts):
        yield indices[start:stop]


def part_of(indices: list[int], rank: int, machines: int) -> list[int]:
    """Return a machine's part of a common batch; at least one sample, even of a tiny batch."""
    start, stop = (len(indices) * each // machines for each in (rank, rank + 1))
    return indices[start:stop] or indices[:1]


def load(task: vcasgd.Task, data: Dataset[Any], indices: list[int]) -> Any:
    if hasattr(data, "__getitems__"):
        return task.collate(data.__getitems__(indices))
    return task.collate([data[index] for index in indices])


def step(
    task: vcasgd.Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> float:
    """Make one step and return the loss before it."""
    optimizer.zero_grad()
    loss = task.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    if task.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
    optimizer.step()
    return loss.item()


def evaluate(task: vcasgd.Task, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
    """Return the means of the task's metrics over a data set."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    indices = list(range(len(data)))  # type: ignore[arg-type]
    sums: dict[str, float] = {}
    with torch.no_grad():
        for start in range(0, len(indices), task.evaluation_batch_size):
            batch = load(task, data, indices[start : start + task.evaluation_batch_size])
            for name, value in task.evaluate(model, batch).items():
                sums[name] = sums.get(name, 0.0) + float(value)
    # A layer that the task put in evaluation mode stays there.
    for module, training in modes:
        module.training = training
    count = sums.pop("count")
    return {name: value / count for name, value in sums.items()}
