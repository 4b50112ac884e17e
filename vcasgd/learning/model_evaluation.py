"""Evaluation of a model over a data set, in one process or in several with a part each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.loader_processes import LoaderProcesses, Request, workers_of
from vcasgd.learning.precision import autocast
from vcasgd.learning.training import batch_size_of, load, prefetched, to_device
from vcasgd.task.task import Task, user_code


@dataclass(frozen=True)
class EvaluationPart:
    """Part of the batches of an evaluation: every ``size``-th one from ``rank`` on.

    All parts have the same number of batches; the results of repeated ones don't count.
    """

    rank: int = 0
    size: int = 1

    def of(self, groups: Sequence[range]) -> list[tuple[range, bool]]:
        """Return the groups of this part, each with True if it counts."""
        places = range(self.rank, -(-len(groups) // self.size) * self.size, self.size)
        return [(groups[min(nth, len(groups) - 1)], nth < len(groups)) for nth in places]


#: Sums of metrics over a part of a data set, and False, or their means over all of it, and True.
Metrics = tuple[dict[str, float], bool]


def evaluate(
    task: Task,
    model: nn.Module,
    dataset: Dataset[Any],
    device: torch.device | str,
    after_step: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Return the means of the task's metrics over a data set, and its samples as ``"count"``.

    Returns ``{}`` if ``after_step`` returns True before the last batch: the mean over a part would
    look like a result. A metric that is not finite is returned as it is. Raises :class:`SpecError`
    if the data set is empty, and :class:`UserCodeError`.
    """
    return means_of([evaluate_part(task, model, dataset, device, EvaluationPart(), after_step)])


def evaluate_part(
    task: Task,
    model: nn.Module,
    dataset: Dataset[Any],
    device: torch.device | str,
    part: EvaluationPart,
    after_step: Callable[[], bool],
) -> Metrics:
    """Do what :func:`evaluate` does for one of several processes.

    A task that :func:`evaluates_at_once` gets the whole data set in each of them.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    at_once = evaluates_at_once(task)
    groups = (EvaluationPart() if at_once else part).of(_evaluation_groups(task, dataset))

    def batches() -> Iterator[Any]:
        stop = False
        for batch in _evaluation_batches(task, dataset, device, [group for group, _ in groups]):
            if stop:
                raise _Stopped
            yield to_device(batch, device)
            stop = after_step()

    with torch.no_grad(), _evaluation_mode(model), autocast(task, device):
        try:
            if at_once and (whole := _metrics_of_all(task, model, batches(), dataset)) is not None:
                return whole, True
            for batch, (_, counts) in zip(batches(), groups, strict=True):
                for name, value in _metrics(task, model, batch).items():
                    sums[name] += value if counts else 0.0
        except _Stopped:
            return {}, False
    return dict(sums), False


def evaluates_at_once(task: Task) -> bool:
    """Return True if a task may evaluate its whole data set itself."""
    return type(task).evaluate_set is not Task.evaluate_set


def means_of(parts: Sequence[Metrics]) -> dict[str, float]:
    """Return the result of :func:`evaluate` from those of all parts."""
    first, is_whole = parts[0]
    if is_whole:
        return first
    if not all(sums for sums, _ in parts):
        return {}
    whole = {name: sum(sums[name] for sums, _ in parts) for name in first}
    count = whole.pop("count")
    if not count > 0:
        raise UserCodeError(f'evaluate returned "count": {count:g} over the whole data set')
    return {name: value / count for name, value in whole.items()} | {"count": count}


def rehearse_evaluation(
    task: Task, model: nn.Module, dataset: Dataset[Any], device: torch.device | str
) -> list[str]:
    """Evaluate the first batch of a data set, and return the names of the metrics.

    Raises what :func:`evaluate` raises.
    """
    with torch.no_grad(), _evaluation_mode(model), autocast(task, device):
        (group, *_) = _evaluation_groups(task, dataset)
        (batch,) = (to_device(each, device) for each in load(task, dataset, [group]))
        metrics = _metrics_of_all(task, model, iter([batch]), dataset)
        return sorted(metrics or _metrics(task, model, batch))


class _Stopped(BaseException):
    """Ends an evaluation. ``except Exception`` of the user's code doesn't catch it."""


def _metrics_of_all(
    task: Task, model: nn.Module, batches: Iterator[Any], dataset: Dataset[Any]
) -> dict[str, float] | None:
    with user_code("evaluate"):
        metrics = task.evaluate_set(model, batches)
        if metrics is None:
            return None
        values = {name: float(value) for name, value in metrics.items()}
    return values | {"count": float(len(dataset))}  # type: ignore[arg-type]


def _evaluation_batches(
    task: Task, dataset: Dataset[Any], device: torch.device | str, groups: Sequence[range]
) -> Iterator[Any]:
    if not workers_of(task):
        yield from load(task, dataset, groups)
        return
    processes = LoaderProcesses(task, dataset, device)
    try:
        requests = [Request(group, number) for number, group in enumerate(groups)]
        yield from prefetched(processes, requests)
    finally:
        processes.close()


def _evaluation_groups(task: Task, dataset: Dataset[Any]) -> list[range]:
    """Return the indices of each batch. Raises :class:`SpecError` if there are none."""
    with user_code("dataset"):
        length = len(dataset)  # type: ignore[arg-type]
    if length == 0:
        raise SpecError("task: the validation data set is empty", field="task")
    size = batch_size_of(task, "evaluation_batch_size")
    return [range(length)[cut : cut + size] for cut in range(0, length, size)]


#: Remedy for what an evaluation returns.
_RETURNS = 'return sums over the batch, and its number of samples as "count"'


def _metrics(task: Task, model: nn.Module, batch: Any) -> dict[str, float]:
    with user_code("evaluate"):
        sums = task.evaluate(model, batch)
        if not isinstance(sums, Mapping):
            raise UserCodeError(
                f"evaluate returned a {type(sums).__name__}, not a dict", remedy=_RETURNS
            )
        metrics = {name: float(value) for name, value in sums.items()}
    if "count" not in metrics:
        raise UserCodeError(
            f'evaluate returned no "count", only {", ".join(sorted(metrics)) or "an empty dict"}',
            remedy=_RETURNS,
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
