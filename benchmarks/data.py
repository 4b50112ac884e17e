"""Measure the waiting time of a worker that reads CIFAR-10 in shards over HTTP:

    python benchmarks/data.py

The object store is moto's server in a separate process on this machine. Requires
``cifar10/data/cifar10.npz`` (``cifar10/prepare.py``). Writes ``results/data.md``.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from moto.server import ThreadedMotoServer

import machine
from benchmarks.measure.data import Reading, measure_reading
from vcasgd.data.dataset import storage_at
from vcasgd.data.shards import make_index

HERE = Path(__file__).resolve().parent
DATA = HERE / "cifar10" / "data" / "cifar10.npz"
OUT = HERE / "results" / "data.md"
BUCKET = "data"
#: Four shards hold one subtask.
SHARDS = 200
#: One worker of four; the step time is that of ResNet-8.
READING = Reading(
    workers=4,
    subtasks=50,
    batch_size=64,
    step_seconds=0.04,
    memory_bytes=64 << 20,
    disk_bytes=1 << 30,
)
START_SECONDS = 60.0
REPORT = """\
# Reading a data set in shards

    python benchmarks/data.py

The 50,000 pictures of CIFAR-10 in {shards} npz shards, over HTTP from a server on the same machine;
one worker of {reading.workers}, an epoch of {reading.subtasks} subtasks, batches of
{reading.batch_size}, {milliseconds:.0f} ms of training for each, {memory} MiB of memory for shards.
Each order starts with empty caches.

|  |  |
| --- | --- |
{facts}

| order | epoch, s | waited, s | hits | shards fetched | MB fetched |
| --- | --- | --- | --- | --- | --- |
{rows}
"""


def main() -> None:
    with _store():
        _fill()
        rows = measure_reading(f"s3://{BUCKET}", READING)
    OUT.write_text(_report(rows))
    print(OUT)


@contextmanager
def _store() -> Iterator[None]:
    # A separate process, because the measurement holds the interpreter lock of this one.
    fresh = multiprocessing.get_context("spawn")
    receiver, sender = fresh.Pipe(duplex=False)
    server = fresh.Process(target=_serve, args=(sender,), daemon=True)
    server.start()
    try:
        if not receiver.poll(START_SECONDS):
            raise SystemExit(f"moto's server did not start within {START_SECONDS:g} s")
        host, port = receiver.recv()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield
    finally:
        server.kill()
        server.join()


def _serve(sender: Connection) -> None:
    # Otherwise it logs a line for each request.
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    sender.send(server.get_host_and_port())
    signal.pause()


def _fill() -> None:
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    with np.load(DATA) as arrays:
        pictures, labels = arrays["x_train"], arrays["y_train"]
    for number, rows in enumerate(np.array_split(np.arange(len(labels)), SHARDS)):
        shard = io.BytesIO()
        np.savez(shard, x=pictures[rows], y=labels[rows])
        client.put_object(Bucket=BUCKET, Key=f"{number:03}.npz", Body=shard.getvalue())
    make_index(storage_at(f"s3://{BUCKET}"))


def _report(rows: list[dict[str, Any]]) -> str:
    facts = [f"| {name} | {value} |" for name, value in machine.describe().items()]
    measured = [
        f"| {row['reading']} | {row['seconds']:.1f} | {row['stall_seconds']:.2f} "
        f"| {row['hit_rate']:.1%} | {row['downloads']} | {row['downloaded_bytes'] / 1e6:.0f} |"
        for row in rows
    ]
    return REPORT.format(
        shards=SHARDS,
        reading=READING,
        milliseconds=1000 * READING.step_seconds,
        memory=READING.memory_bytes >> 20,
        facts="\n".join(facts),
        rows="\n".join(measured),
    )


if __name__ == "__main__":
    main()
