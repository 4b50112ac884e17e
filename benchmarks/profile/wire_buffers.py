"""Measure the cost of one hop with different sizes of the kernel's send buffer for TCP.

    python benchmarks/profile/wire_buffers.py

One client moves 64 MiB in strings of 1 MiB through ``vcasgd.store.bulk_transfer``; the best of
three rounds counts. Stop other programs before you run it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from vcasgd.errors import StoreError
from vcasgd.store import bulk_transfer
from vcasgd.store.connection import connect
from vcasgd.store.embedded import ServerFiles, server_command, write_configuration
from vcasgd.store.tensors.chunks import CHUNK_BYTES

MEGABYTES = 64
REPETITIONS = 8
SIZES = (1 << 17, 1 << 19, 1 << 21, 1 << 22)


@contextmanager
def server(port: int = 27799) -> Iterator[tuple[ServerFiles, psutil.Process]]:
    with tempfile.TemporaryDirectory() as folder:
        files = ServerFiles(Path(folder), port, secrets.token_hex(8))
        write_configuration(files, durable=False)
        process = subprocess.Popen(server_command(files), stdout=subprocess.DEVNULL)
        try:
            client = connect(files.url)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    client.ping()
                    break
                except StoreError:
                    time.sleep(0.05)
            yield files, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(10)


def measured(call: Callable[[], object], process: psutil.Process) -> str:
    def spent() -> tuple[float, float, float]:
        times = process.cpu_times()
        return time.perf_counter(), time.process_time(), times.user + times.system

    call()
    rounds = []
    for _ in range(3):
        before = spent()
        for _ in range(REPETITIONS):
            call()
        rounds.append([(b - a) / REPETITIONS for a, b in zip(before, spent(), strict=True)])
    wall, here, there = min(rounds)
    rate = MEGABYTES * CHUNK_BYTES / wall / 1e9
    return f"{rate:5.2f} GB/s   client {here * 1e3:5.1f} ms   server {there * 1e3:5.1f} ms"


def drain(bulk: bulk_transfer.BulkTransfer, keys: list[str], views: list[memoryview]) -> None:
    for _ in bulk.load(keys, views):
        pass


def main() -> None:
    memory = memoryview(bytearray(os.urandom(CHUNK_BYTES) * MEGABYTES))
    views = [memory[at : at + CHUNK_BYTES] for at in range(0, len(memory), CHUNK_BYTES)]
    keys = [f"k:{index}" for index in range(MEGABYTES)]
    with server() as (files, process):
        for url, name, sizes in ((files.url, "tcp", SIZES), (files.nearest_url, "unix", (0,))):
            for size in sizes:
                bulk_transfer.LOCAL_SEND_BUFFER = size
                client = connect(url)
                bulk = bulk_transfer.BulkTransfer(client)
                items = list(zip(keys, views, strict=True))
                store = measured(partial(bulk.store, items), process)
                load = measured(partial(drain, bulk, keys, views), process)
                print(f"{name:4}  buffers of {size >> 10:5} KiB   store {store}   load {load}")
                sys.stdout.flush()
                client.close()


if __name__ == "__main__":
    main()
