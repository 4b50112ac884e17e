"""Loader processes: order, seeds, prefetching, and their end."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.waiting import PATIENCE
from torch import Tensor
from torch.utils.data import Dataset

import vcasgd
from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.loader_processes import LoaderProcesses, Request, workers_of
from vcasgd.learning.model_evaluation import evaluate
from vcasgd.learning.training import prefetched


class Noisy(Dataset[Tensor]):
    """A sample is its index, the process that loaded it, and three random numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([index, os.getpid(), *drawn], dtype=torch.float64)


class Augments(vcasgd.Task):
    loader_workers = 2
    evaluation_batch_size = 3

    def dataset(self, split: str) -> Dataset[Any]:
        return Noisy()

    def evaluate(self, model: torch.nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"index": batch[:, 0].sum(), "count": torch.tensor(len(batch))}


def requests(*starts: int) -> list[Request]:
    return [Request([start, start + 1], seed=start) for start in starts]


@pytest.fixture
def processes() -> Iterator[LoaderProcesses]:
    loader = LoaderProcesses(Augments(), Noisy(), "cpu")
    yield loader
    loader.close()
    assert not own_children()


def own_children() -> list[int]:
    """Return the loader processes of this test; other tests have other children."""
    children = multiprocessing.active_children()
    return [each.pid for each in children if each.pid is not None and each.daemon]


def loaded(batches: Iterator[Any]) -> Tensor:
    """Return the columns index and random numbers of all samples."""
    return torch.cat(list(batches))[:, [0, 2, 3, 4]]


def test_batches_come_in_order_from_other_processes(processes: LoaderProcesses) -> None:
    batch = torch.cat(list(processes.load(requests(6, 2, 8, 4))))
    assert batch[:, 0].tolist() == [6, 7, 2, 3, 8, 9, 4, 5]
    pids = set(batch[:, 1].tolist())
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_random_numbers_depend_on_the_batch_only(processes: LoaderProcesses) -> None:
    first = loaded(processes.load(requests(0, 2, 4)))
    again = loaded(processes.load(requests(4, 0)))
    assert torch.equal(first[[4, 5, 0, 1]], again)


def test_the_random_state_of_training_stays(processes: LoaderProcesses) -> None:
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    list(processes.load(requests(0, 2)))
    assert torch.rand(()) == expected


def test_prefetched_batches_are_used(processes: LoaderProcesses) -> None:
    list(processes.load(requests(0), ahead=requests(2, 4, 6, 8)))
    sent = list(processes._requests.sent)
    assert [each.indices[0] for each in sent] == [2, 4, 6, 8][: len(sent)]
    assert len(sent) == 4
    second = processes.load(requests(2, 4), ahead=requests(6, 8, 10))
    assert loaded(second)[:, 0].tolist() == [2, 3, 4, 5]


def test_wrong_forecast_is_dropped(processes: LoaderProcesses) -> None:
    list(processes.load(requests(0), ahead=requests(2, 4, 6)))
    assert loaded(processes.load(requests(20, 22)))[:, 0].tolist() == [20, 21, 22, 23]


def test_forecast_may_change_behind_the_wanted_batches(processes: LoaderProcesses) -> None:
    list(processes.load(requests(0), ahead=requests(2, 4, 6, 8)))
    assert loaded(processes.load(requests(2), ahead=requests(30, 32)))[:, 0].tolist() == [2, 3]
    assert loaded(processes.load(requests(30)))[:, 0].tolist() == [30, 31]


def test_stopped_interval_resumes_at_the_next_batch(processes: LoaderProcesses) -> None:
    interval = processes.load(requests(0, 2, 4, 6, 8))
    assert next(interval)[:, 0].tolist() == [0, 1]
    interval.close()
    assert loaded(processes.load(requests(2, 4)))[:, 0].tolist() == [2, 3, 4, 5]


class Damaged(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            raise ValueError("sample 4 is damaged")
        return super().__getitem__(index)


def test_error_of_the_data_set() -> None:
    loader = LoaderProcesses(Augments(), Damaged(), "cpu")
    with pytest.raises(UserCodeError, match="sample 4 is damaged"):
        list(prefetched(loader, requests(0, 2, 4)))
    assert loaded(loader.load(requests(6)))[0, 0] == 6
    loader.close()


def test_killed_process(processes: LoaderProcesses) -> None:
    list(processes.load(requests(0)))
    assert len(own_children()) == 2
    for pid in own_children():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker"):
        list(processes.load(requests(2, 4, 6, 8)))
    assert loaded(processes.load(requests(2)))[0, 0] == 2


class Reads(Noisy):
    """Reads in the worker and converts in a loader process, like ShardedDataset."""

    def read(self, indices: list[int]) -> list[tuple[int, int]]:
        return [(index, os.getpid()) for index in indices]

    def convert(self, samples: list[tuple[int, int]]) -> list[Tensor]:
        return [torch.tensor([index, pid, os.getpid()]) for index, pid in samples]


def test_data_set_that_reads_in_the_worker() -> None:
    loader = LoaderProcesses(Augments(), Reads(), "cpu")
    [batch] = loader.load(requests(2))
    loader.close()
    assert batch[:, 0].tolist() == [2, 3]
    assert set(batch[:, 1].tolist()) == {os.getpid()}
    assert os.getpid() not in batch[:, 2].tolist()


def test_evaluation_uses_them_and_ends_them() -> None:
    task = Augments()
    data = torch.utils.data.Subset(Noisy(), range(8))
    metrics = evaluate(*(task, torch.nn.Identity(), data, "cpu"))
    assert metrics == {"index": 3.5, "count": 8}
    assert not own_children()


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_invalid_number(value: Any) -> None:
    task = Augments()
    task.loader_workers = value
    with pytest.raises(SpecError, match="loader_workers is"):
        workers_of(task)


HANGS = """
import os, signal, sys, time, torch, vcasgd
from vcasgd.learning.loader_processes import LoaderProcesses, Request

signal.signal(signal.SIGTERM, lambda *_: None)  # As a worker does.

class Slow(torch.utils.data.Dataset):
    def __getitem__(self, index):
        # In one write, because two processes write to one pipe.
        os.write(1, b"%d\\n" % os.getpid())
        if index:
            time.sleep(600)
        return torch.zeros(1)

task = vcasgd.Task()
task.loader_workers = 2
loader = LoaderProcesses(task, Slow(), "cpu")
list(loader.load([Request([0]), Request([0])], [Request([1]), Request([1])]))
if sys.argv[1] == "close":
    loader.close()
    print("closed", flush=True)
time.sleep(600)
"""


@pytest.mark.ci
@pytest.mark.parametrize("end", ["kill", "close"])
def test_no_process_is_left(tmp_path: Path, end: str) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    worker = subprocess.Popen(
        [sys.executable, str(program), end], stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        loaders = set()
        while len(loaders) < 2:
            loaders.add(int(worker.stdout.readline()))
        assert all(psutil.pid_exists(pid) for pid in loaders)
        if end == "kill":
            worker.kill()
        deadline = time.monotonic() + PATIENCE
        while any(map(psutil.pid_exists, loaders)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(psutil.pid_exists, loaders))
    finally:
        worker.kill()
        worker.communicate()


# --- files and connections that a data set opened before the processes were forked --------------

SAMPLES = 400


class Opened(Dataset[int]):
    """Reads each sample from a file that it opened before; a sample is its index."""

    def __init__(self, read: Callable[[int], int]) -> None:
        self._read = read

    def __getitem__(self, index: int) -> int:
        return self._read(index)


def plain_file(folder: Path, opened: ExitStack) -> Callable[[int], int]:
    path = folder / "numbers"
    path.write_bytes(b"".join(index.to_bytes(4, "big") * 5000 for index in range(SAMPLES)))
    file = opened.enter_context(path.open("rb"))

    def read(index: int) -> int:
        file.seek(index * 20_000 + 8)
        return int.from_bytes(file.read(4), "big")

    return read


def database(folder: Path, opened: ExitStack) -> Callable[[int], int]:
    connection = opened.enter_context(closing(sqlite3.connect(folder / "numbers.db")))
    connection.execute("create table numbers (id integer primary key, number integer)")
    connection.executemany("insert into numbers values (?, ?)", [(i, i) for i in range(SAMPLES)])
    connection.commit()
    query = "select number from numbers where id = ?"
    return lambda index: int(connection.execute(query, (index,)).fetchone()[0])


@pytest.mark.parametrize("make", [plain_file, database])
def test_processes_do_not_move_the_position_of_each_other(make: Any, tmp_path: Path) -> None:
    with ExitStack() as opened:
        processes = LoaderProcesses(Augments(), Opened(make(tmp_path, opened)), "cpu")
        groups = [list(range(first, first + 4)) for first in range(0, SAMPLES, 4)]

        loaded = list(processes.load([Request(group) for group in groups]))
        processes.close()

    assert torch.cat(loaded).tolist() == list(range(SAMPLES))


def number_connections(server: socket.socket) -> None:
    """Answer each byte on a connection with the number of that connection, from 1."""

    def answer(connection: socket.socket, number: int) -> None:
        with connection:
            while connection.recv(1):
                connection.send(bytes([number]))

    for number in range(1, 10):
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=answer, args=(connection, number), daemon=True).start()


class Client(Dataset[int]):
    """Connects again if its connection was closed, as clients of databases do."""

    def __init__(self, address: Any) -> None:
        self.address = address
        self.connection = socket.create_connection(address)

    def __getitem__(self, index: int) -> int:
        try:
            return self._ask()
        except OSError:
            self.connection.close()
            self.connection = socket.create_connection(self.address)
            return self._ask()

    def _ask(self) -> int:
        self.connection.send(b"?")
        return self.connection.recv(1)[0]


def test_a_connection_is_not_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=number_connections, args=(server,), daemon=True).start()
        client = Client(server.getsockname())
        own = client[0]
        processes = LoaderProcesses(Augments(), client, "cpu")

        loaded = list(processes.load([Request([0, 1]), Request([2, 3]), Request([4, 5])]))
        processes.close()

        answers = torch.cat(loaded).tolist()
        assert own not in answers
        assert len(set(answers)) == 2
        assert client[0] == own
        client.connection.close()
        server.shutdown(socket.SHUT_RDWR)
