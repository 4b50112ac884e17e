"""Loads batches ahead of their use, in the processes of a torch ``DataLoader``.

The processes stay over push intervals and subtasks, and load on what will probably be trained next.
A prefetched batch is only used if it is exactly the one that the training asks for, so prefetching
can't change which samples are trained.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vcasgd.errors import SpecError
from vcasgd.fork_server import die_with
from vcasgd.learning.tolerant_loading import FetchedSamples, fetched, samples_of, tolerant
from vcasgd.task.task import Task

#: Seconds that an ended process has to finish what it does.
END_SECONDS = 1.0
#: Data sets needn't be picklable for a fork, and it starts in milliseconds.
_CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Request:
    """Indices of a batch, and the seed in [0, 2⁶³) of the random numbers that loading it draws."""

    indices: Sequence[int]
    seed: int = 0


def workers_of(task: Task) -> int:
    """Return the number of a task's loader processes. Raises :class:`SpecError`."""
    for name, least in (("loader_workers", 0), ("prefetch_factor", 1)):
        value: Any = getattr(task, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpecError(
                f"task: {name} is {value!r}, not a whole number of at least {least}", field="task"
            )
    return task.loader_workers


class LoaderProcesses:
    """The ``task.loader_workers`` processes of one data set, at least 1.

    They start with the first batch, load ``task.prefetch_factor`` batches each ahead, and die with
    this process. Batches are in pinned memory if ``device`` is a GPU. Use it in one thread only.
    """

    def __init__(
        self,
        task: Task,
        dataset: Dataset[Any],
        device: torch.device | str,
        *,
        skips: bool = False,
    ) -> None:
        """``skips``: batches are :class:`~vcasgd.learning.tolerant_loading.LoadedBatch`."""
        self._task, self._dataset, self._skips = task, dataset, skips
        self._on_gpu = torch.device(device).type == "cuda"
        self._requests = _Requests(dataset)
        self._loader: DataLoader[Any] | None = None
        self._batches: Any = None
        self._ended: Any = None

    def _new_loader(self) -> DataLoader[Any]:
        task = self._task
        self._ended = _CONTEXT.RawValue("b", 0)
        start = partial(_start_process, os.getpid(), self._ended, task.worker_init_fn)
        collate: Any = tolerant(task.collate) if self._skips else task.collate
        return DataLoader(
            _SeededDataset(self._dataset, skips=self._skips),
            batch_sampler=self._requests,  # type: ignore[arg-type]  # no lists, but requests
            collate_fn=collate,
            num_workers=workers_of(task),
            prefetch_factor=task.prefetch_factor,
            persistent_workers=True,
            pin_memory=task.pin_memory and self._on_gpu,
            worker_init_fn=start,
            # What the processes draw must not change what the model draws.
            generator=torch.Generator(),
            multiprocessing_context=_CONTEXT,
        )

    def load(self, wanted: Sequence[Request], ahead: Iterable[Request] = ()) -> Iterator[Any]:
        """Yield the batches of ``wanted``, while the processes continue with those of ``ahead``.

        Both may contain batches that are under way already. Raises what the data set raises; the
        next call then starts new processes.
        """
        try:
            if not self._goes_on_with(wanted, ahead):
                self._requests.restart(chain(wanted, ahead))
                if self._loader is None:
                    self._loader = self._new_loader()
                self._batches = iter(self._loader)
            for _ in wanted:
                batch = next(self._batches)
                self._requests.sent.popleft()
                yield batch
        except Exception:
            self.close()
            raise

    def _goes_on_with(self, wanted: Sequence[Request], ahead: Iterable[Request]) -> bool:
        """Return True if the batches under way are the wanted ones; add those that follow."""
        sent = list(self._requests.sent)
        count = min(len(sent), len(wanted))
        if self._batches is None or not count or sent[:count] != list(wanted[:count]):
            return False
        following = chain(wanted, ahead)
        if list(islice(following, len(sent))) == sent:
            self._requests.source = following
        return True

    def close(self) -> None:
        """End the processes, which takes about :data:`END_SECONDS` if the data set hangs.

        A later :meth:`load` starts new ones.
        """
        self._requests.restart(())
        if self._batches is not None:
            self._ended.value = 1
            # Otherwise an exception that refers to the iterator would keep them.
            self._batches._shutdown_workers()
        self._loader = self._batches = None


class _Requests:
    """Requests for the processes, as the batch sampler of their loader."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._read = getattr(dataset, "read", None) if _reads_itself(dataset) else None
        self.source: Iterator[Request] = iter(())
        #: Requests whose batches weren't returned yet.
        self.sent: deque[Request] = deque()

    def restart(self, requests: Iterable[Request]) -> None:
        """Forget what was sent, and continue with ``requests``."""
        self.source = iter(requests)
        self.sent.clear()

    def __iter__(self) -> Iterator[tuple[Request, Any]]:
        return self

    def __next__(self) -> tuple[Request, Any]:
        request = next(self.source)
        samples = self._read(request.indices) if self._read else None
        self.sent.append(request)
        return request, samples


class _SeededDataset(Dataset[Any]):
    """Loads the samples of a request in a loader process."""

    def __init__(self, dataset: Dataset[Any], *, skips: bool) -> None:
        self._dataset, self._skips = dataset, skips

    def __getitems__(self, sent: tuple[Request, Any]) -> list[Any] | FetchedSamples:
        request, samples = sent
        set_random_state(request.seed)
        dataset: Any = self._dataset

        def load(positions: Sequence[int]) -> list[Any]:
            if samples is not None:
                return list(dataset.convert([samples[at] for at in positions]))
            return samples_of(dataset, [request.indices[at] for at in positions])

        positions = range(len(request.indices))
        return fetched(request.indices, load) if self._skips else load(positions)


def _reads_itself(dataset: Dataset[Any]) -> bool:
    """Return True if a data set reads samples in the worker and converts them in any process.

    Connections to a storage don't survive the fork of a process.
    """
    return callable(getattr(dataset, "read", None)) and callable(getattr(dataset, "convert", None))


def set_random_state(seed: int) -> None:
    """Seed the random numbers that data sets draw: those of torch, NumPy, and Python."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _start_process(
    parent: int, ended: Any, init: Callable[[int], None] | None, number: int
) -> None:
    """Make a loader process end with its worker, whatever ends that."""
    # The worker's own handlers would only note that it has to leave.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    threading.Thread(target=_end_with, args=(ended,), daemon=True).start()
    if init is not None:
        init(number)


def _end_with(ended: Any) -> None:
    # An event could wait forever for a process that was killed.
    while not ended.value:
        time.sleep(END_SECONDS / 4)
    time.sleep(END_SECONDS)
    os._exit(0)
