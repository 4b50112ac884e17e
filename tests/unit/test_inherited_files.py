"""Files and connections that a data set opened before its loader processes were forked."""

from __future__ import annotations

import socket
import sqlite3
import threading
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import vcasgd
from vcasgd.learning.loader_processes import LoaderProcesses, Request

SAMPLES = 400


class Opened(Dataset[int]):
    """Reads each sample from a file that it opened before; a sample is its index."""

    def __init__(self, read: Callable[[int], int]) -> None:
        self._read = read

    def __len__(self) -> int:
        return SAMPLES

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


def zip_file(folder: Path, opened: ExitStack) -> Callable[[int], int]:
    with zipfile.ZipFile(folder / "numbers.zip", "w") as archive:
        for index in range(SAMPLES):
            archive.writestr(str(index), str(index) * 1000)
    archive = opened.enter_context(zipfile.ZipFile(folder / "numbers.zip"))
    return lambda index: int(archive.read(str(index))[: len(str(index))])


def database(folder: Path, opened: ExitStack) -> Callable[[int], int]:
    connection = opened.enter_context(closing(sqlite3.connect(folder / "numbers.db")))
    connection.execute("create table numbers (id integer primary key, number integer)")
    connection.executemany("insert into numbers values (?, ?)", [(i, i) for i in range(SAMPLES)])
    connection.commit()
    query = "select number from numbers where id = ?"
    return lambda index: int(connection.execute(query, (index,)).fetchone()[0])


@pytest.mark.parametrize("make", [plain_file, zip_file, database])
def test_processes_do_not_move_the_position_of_each_other(make: Any, tmp_path: Path) -> None:
    class Reads(vcasgd.Task):
        loader_workers = 2

    with ExitStack() as opened:
        processes = LoaderProcesses(Reads(), Opened(make(tmp_path, opened)), "cpu")
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

    def __len__(self) -> int:
        return 8

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
    class Reads(vcasgd.Task):
        loader_workers = 2

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=number_connections, args=(server,), daemon=True).start()
        client = Client(server.getsockname())
        own = client[0]
        processes = LoaderProcesses(Reads(), client, "cpu")

        loaded = list(processes.load([Request([0, 1]), Request([2, 3]), Request([4, 5])]))
        processes.close()

        answers = torch.cat(loaded).tolist()
        assert own not in answers
        assert len(set(answers)) == 2
        assert client[0] == own
        client.connection.close()
        server.shutdown(socket.SHUT_RDWR)
