"""Batches of a learner's push intervals, loaded ahead if the task has loader processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.data import Dataset

from vcasgd.errors import UserCodeError
from vcasgd.learning.draws import seed_for, set_epoch
from vcasgd.learning.loader_processes import LoaderProcesses, Request, workers_of
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.learning.training import (
    Part,
    batch_size_of,
    batches_of,
    gathered,
    micro_batches,
    prefetched,
    step_groups,
)
from vcasgd.task.task import Task, user_code


@dataclass(frozen=True)
class SampleRange:
    """Samples ``[start, stop)`` of a subtask."""

    subtask: int
    start: int
    stop: int


class BatchSource:
    """Owner of the loader processes of a task's training set.

    ``step_size(samples)`` returns the samples of each local step in an interval of so many samples;
    by default, it is the task's batch size.
    """

    def __init__(
        self,
        task: Task,
        dataset: Dataset[Any],
        device: torch.device | str,
        seed: int,
        step_size: Callable[[int], int] | None = None,
        *,
        crosses: Callable[[], bool] = lambda: False,
        skips: bool = False,
    ) -> None:
        """``crosses()``: steps don't end where a sampler's own batches do now.

        ``skips``: batches leave out samples that can't be loaded, and name them.
        """
        self._skips = skips
        self._task, self._dataset, self._device, self._seed = task, dataset, device, seed
        self._step_size = step_size or (lambda _: batch_size_of(task))
        self._crosses = crosses
        self.part: Part = lambda group: (group, len(group))
        self._processes: LoaderProcesses | None = None
        #: The epoch that the data set was told.
        self._epoch: int | None = None
        #: The last two subtasks that were started.
        self._started: deque[int] = deque(maxlen=2)

    @property
    def turn(self) -> int:
        """Subtasks from one that this worker leases to its next one: workers take turns."""
        return max(1, self._started[-1] - self._started[0])

    def announce(self, plan: EpochPlan, subtask: int, start: int) -> None:
        """Announce to the data set which samples it will be asked for, if it has ``will_read``.

        The samples of this subtask come first, then those of the probable next one, which is as far
        ahead as this one was.
        """
        if subtask in self._started:
            return
        self._started.append(subtask)
        will_read = getattr(self._dataset, "will_read", None)
        if will_read is None:
            return
        ahead = subtask + self.turn
        will_read(plan.indices(subtask, start, plan.size(subtask)))
        if ahead < plan.total_subtasks:
            will_read(plan.indices(ahead, 0, plan.size(ahead)))

    def reading(self) -> dict[str, float]:
        """Return the data set's counters of its reads; empty if it has none."""
        counters = getattr(self._dataset, "read_counters", None)
        try:
            return dict(counters()) if callable(counters) else {}
        except Exception:  # noqa: BLE001 - user code
            # The data set is the user's, and may use this name for something else.
            return {}

    def batches(
        self, plan: EpochPlan, interval: SampleRange, following: Iterable[SampleRange]
    ) -> Iterator[tuple[Any, int]]:
        """Return the batches of an interval with their numbers of samples.

        Loader processes then continue with those of the ``following`` intervals.
        """
        self._follow_epoch(plan, interval)
        if not workers_of(self._task):
            used = list(map(self.part, self._groups(plan, interval)))
            return batches_of(self._task, self._dataset, used, skips=self._skips)
        if self._processes is None:
            self._processes = LoaderProcesses(
                self._task, self._dataset, self._device, skips=self._skips
            )
        steps = list(self._requests(plan, interval))
        ahead = chain.from_iterable(
            step for later in following for step in self._requests(plan, later)
        )
        loaded = prefetched(self._processes, list(chain.from_iterable(steps)), ahead)
        return gathered(loaded, [[len(part.indices) for part in step] for step in steps])

    def _requests(self, plan: EpochPlan, interval: SampleRange) -> Iterator[list[Request]]:
        """Yield the micro-batches of each local step."""
        start, epoch = interval.start, plan.epoch_of(interval.subtask)
        for group in self._groups(plan, interval):
            step = []
            for part in micro_batches(self._task, *self.part(group)):
                # A worker that repeats a batch after an eviction draws the same augmentations.
                seed = seed_for(self._seed, interval.subtask, start)
                step.append(Request(part, seed, epoch))
                start += len(part)
            yield step

    def step_sizes(self, plan: EpochPlan, interval: SampleRange) -> list[int]:
        """Return the number of samples in each local step of an interval, of all processes."""
        return list(map(len, self._groups(plan, interval)))

    def _groups(self, plan: EpochPlan, interval: SampleRange) -> list[list[int]]:
        """Return the indices of each local step."""
        subtask, start, stop = interval.subtask, interval.start, interval.stop
        ends = None if self._crosses() else plan.ends(subtask, start, stop)
        if ends is not None:
            # The last one of each local step.
            last = self._task.batches_per_step - 1
            ends = [end - start for end in (*ends[last : -1 : last + 1], stop)]
        size = self._step_size(stop - start)
        return step_groups(
            plan.indices(subtask, start, stop), size, ends, batch_size_of(self._task)
        )

    def _follow_epoch(self, plan: EpochPlan, interval: SampleRange) -> None:
        if (epoch := plan.epoch_of(interval.subtask)) != self._epoch:
            with user_code("set_epoch"):
                told = set_epoch(self._dataset, epoch)
                length = len(self._dataset) if told else 0  # type: ignore[arg-type]
            if told and plan.order is None and length != plan.samples:
                raise UserCodeError(
                    f"set_epoch changed the number of samples from {plan.samples} to {length}",
                    remedy="keep it, and let set_epoch choose which samples the indices name",
                )
            self._epoch = epoch

    def close(self) -> None:
        """End the loader processes; the next batch starts new ones."""
        if self._processes is not None:
            self._processes.close()
