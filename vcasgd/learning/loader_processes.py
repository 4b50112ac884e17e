"""Loads batches ahead of their use, in the processes of a torch ``DataLoader``.

The processes stay over push intervals and subtasks, and load on what will probably be trained next.
A prefetched batch is only used if it is exactly the one that the training asks for, so prefetching
can't change which samples are trained.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Dataset

from vcasgd.errors import SpecError
from vcasgd.fork_server import die_with
from vcasgd.learning.draws import set_epoch, set_random_state
from vcasgd.learning.tolerant_loading import FetchedSamples, fetched, samples_of, tolerant
from vcasgd.task.task import Task

#: Seconds that an ended process has to finish what it does.
END_SECONDS = 1.0
#: Data sets needn't be picklable for a fork, and it starts in milliseconds.
_CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Request:
    """Indices of a batch, the seed in [0, 2⁶³) of the random numbers that loading it draws, and the
    epoch that the data set is told, if it has ``set_epoch``."""

    indices: Sequence[int]
    seed: int = 0
    epoch: int | None = None


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
        stream = bool(getattr(self._dataset, "is_stream", False))
        # A stream calls the function for each shard, and one process reads it.
        init = None if stream else task.worker_init_fn
        start = partial(_start_process, os.getpid(), self._ended, init)
        collate: Any = tolerant(task.collate) if self._skips else task.collate
        return DataLoader(
            _SeededDataset(self._dataset, skips=self._skips),
            batch_sampler=self._requests,  # type: ignore[arg-type]  # no lists, but requests
            collate_fn=collate,
            num_workers=min(workers_of(task), 1) if stream else workers_of(task),
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
        self.inner, self._skips = dataset, skips
        self._epoch: int | None = None

    def __getitems__(self, sent: tuple[Request, Any]) -> list[Any] | FetchedSamples:
        request, samples = sent
        if request.epoch is not None and request.epoch != self._epoch:
            set_epoch(self.inner, request.epoch)
            self._epoch = request.epoch
        set_random_state(request.seed)
        dataset: Any = self.inner

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


def _start_process(
    parent: int, ended: Any, init: Callable[[int], None] | None, number: int
) -> None:
    """Make a loader process end with its worker, whatever ends that."""
    # The worker's own handlers would only note that it has to leave.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    threading.Thread(target=_end_with, args=(ended,), daemon=True).start()
    separate_files()
    info: Any = torch_worker._worker_info
    # Functions expect the data set of the user.
    torch_worker._worker_info = replace(info, dataset=info.dataset.inner)
    if init is not None:
        init(number)


def _end_with(ended: Any) -> None:
    # An event could wait forever for a process that was killed.
    while not ended.value:
        time.sleep(END_SECONDS / 4)
    time.sleep(END_SECONDS)
    os._exit(0)


# -- files that a data set opened before the fork -------------------------------------------------

#: Files below are those of the standard streams.
_FIRST = 3


def separate_files() -> None:
    """Give this process, which was just forked, files with positions of its own.

    Files that are read are opened again under the same number and at the same position. Connections
    to other machines and processes are replaced by closed ones, so a client that can connect
    again does, and any other one fails. Pipes, listening sockets, and files that are only written
    stay.
    """
    for number in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        # The descriptor of the listing itself is closed already, and others may be special.
        with suppress(OSError):
            if number >= _FIRST:
                _separate(number)


def _separate(number: int) -> None:
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        flags = fcntl.fcntl(number, fcntl.F_GETFL)
        if flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_APPEND:
            return
        position = os.lseek(number, 0, os.SEEK_CUR)
        _replace(number, os.open(f"/proc/self/fd/{number}", flags & ~os.O_CREAT & ~os.O_EXCL))
        os.lseek(number, position, os.SEEK_SET)
    elif stat.S_ISSOCK(mode) and _is_connected_stream(number):
        mine, other = socket.socketpair()
        other.close()
        _replace(number, mine.detach())


def _is_connected_stream(number: int) -> bool:
    with closing(socket.socket(fileno=os.dup(number))) as inherited:
        if inherited.type != socket.SOCK_STREAM:
            return False
        inherited.getpeername()
        return inherited.family in (socket.AF_INET, socket.AF_INET6)


def _replace(number: int, opened: int) -> None:
    os.dup2(opened, number, inheritable=os.get_inheritable(number))
    os.close(opened)
