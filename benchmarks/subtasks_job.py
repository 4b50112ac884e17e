"""A job with many subtasks for ``subtasks.py``, in this version of vcasgd or in an earlier one."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from vcasgd.errors import StoreError
from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.learning.length import plan_for
from vcasgd.parameter_server.shard import Shard
from vcasgd.spec.job import JobSpec
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect, script_source
from vcasgd.store.embedded import ServerFiles, server_command, write_configuration
from vcasgd.store.keys import LedgerKeys, TensorKeys
from vcasgd.store.ledger.job import JobState, ModelFacts
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import Meta, Record
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.store.tensors.updates import UpdateSender

#: Samples of a subtask, and floats of the model.
SAMPLES, FLOATS = 2, 1024
#: Updates until the end of the epoch.
LAST = 40
#: Seconds after which a case is given up.
CASE_SECONDS = 120.0
#: Durations below this are not in the slow log.
SLOW_US = 100


@contextmanager
def server(name: str) -> Iterator[Any]:
    """Start the ``ledger`` or a tensors server, and yield a client."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        files = ServerFiles(Path(folder), port, secrets.token_hex(8))
        more = [f"slowlog-log-slower-than {SLOW_US}", "slowlog-max-len 100000"]
        write_configuration(files, durable=name == "ledger", more=more)
        command = server_command(files, os.environ.get("VCASGD_REDIS_SERVER"))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = connect(files.url, answer_seconds=CASE_SECONDS)
        try:
            while True:
                try:
                    client.ping()
                    break
                except StoreError:
                    time.sleep(0.02)
            yield client
        finally:
            process.kill()
            process.wait()


class Job:
    """A job with a number of subtasks per epoch, its parameter server, and its worker."""

    def __init__(self, ledger: Any, tensors: Any, subtasks: int) -> None:
        self.ledger, self.tensors, self.subtasks = ledger, tensors, subtasks
        rule = {"rule": "async-local-sgd", "eta": 1.0}
        length = {"epochs": 2, "subtasks_per_epoch": subtasks}
        spec = JobSpec.parse({"name": "job", "task": "t:T", "update": rule, **length})
        self.plan = plan_for(spec, SAMPLES * subtasks, SAMPLES)
        self.layout = Layout((TensorEntry("w", (FLOATS,), TensorKind.PARAMETER, 0),))
        facts = ModelFacts(self.plan.samples, 1, self.layout.to_json(), "", batch_size=SAMPLES,
                           subtasks_per_epoch=subtasks)  # fmt: skip
        jobs = Jobs(ledger)
        self.job = jobs.submit(spec, "0" * 64).id
        self.keys = TensorKeys(self.job)
        self.snapshots = SnapshotStore(tensors, self.keys)
        self.leases = Leases(ledger, self.job, "worker", 3600.0)
        meta = Meta(0, 0, FLOATS, FLOATS, self.layout.digest())
        self.snapshots.install(0, meta, Record(), torch.zeros(FLOATS))
        lease: Any = self.leases.acquire()
        assert self.leases.report_facts(lease, facts.to_dict())
        jobs.set_plan(self.job, facts.points(spec))
        jobs.transition(self.job, JobState.RUNNING, [JobState.STARTING], why="facts are known")
        storage = Storage(f"file://{tempfile.gettempdir()}")
        self.shard = Shard(
            jobs.get(self.job), 1, tensors=tensors, ledger=ledger,
            checkpoints=ModelCheckpoints(storage, self.job), executor=ThreadPoolExecutor(1),
        )  # fmt: skip
        self.sender = UpdateSender(tensors, self.keys)
        self.payload = memoryview(bytes(4 * FLOATS))
        self.out = torch.empty(FLOATS)
        self.named = 0

    def apply(self, subtasks: int) -> None:
        """Write an applied record that has the first subtasks."""
        fields: dict[str, Any]
        try:
            from vcasgd.learning.applied_record import BLOCK, SubtaskSet

            full = subtasks // BLOCK * BLOCK
            blocks = dict.fromkeys(range(full // BLOCK), b"\xff" * (BLOCK // 8))
            rest = SubtaskSet()
            for subtask in range(full, subtasks):
                rest.add(subtask)
            fields = {f"b{block}": bits for block, bits in {**blocks, **rest.blocks}.items()}
        except ImportError:  # an earlier version
            fields = {str(subtask): SAMPLES for subtask in range(subtasks)}
        names = list(fields)
        for at in range(0, len(names), 10_000):
            part = {name: fields[name] for name in names[at : at + 10_000]}
            self.tensors.hset(self.keys.applied, mapping=part)

    def push(self, updates: int) -> None:
        """Do what workers do for a number of updates."""
        held, pushed = [], []
        for _ in range(updates):
            lease: Any = self.leases.acquire()
            if str(lease.kind) == "evaluate":
                lease = self.leases.acquire()
            subtask, epoch = lease.number, self.plan.epoch_of(lease.number)
            start = self.sender.begin(subtask, epoch, SAMPLES, lease.token)
            self.named += 1
            header = Header(
                update=f"u{self.named}", worker="worker", subtask=subtask, start=start,
                stop=SAMPLES, base=0, token=lease.token, codec="float32", size=len(self.payload),
                checksum=xxh3_64_intdigest(self.payload), layout=self.layout.digest(), loss_sum=1.0,
            )  # fmt: skip
            assert self.sender.push(header, epoch, self.payload).accepted
            held.append(lease)
            pushed.append((subtask, epoch, SAMPLES, header.update))
        self.leases.renew({}, held)
        fetch: Any = getattr(self.snapshots, "fetch_rounded", self.snapshots.fetch)
        fetch(self.out)
        self.sender.status(pushed)

    def blend(self, updates: int) -> float:
        """Blend and publish pushed updates; return the seconds of it."""
        started = time.perf_counter()
        while updates > 0:
            updates -= self.shard.turn()
        return time.perf_counter() - started

    def recover(self, subtasks: int) -> float:
        """Start the parameter server with a record that has the first subtasks.

        Returns the seconds until the end of its first turn.
        """
        self.apply(subtasks)
        started = time.perf_counter()
        self.shard.turn()
        return time.perf_counter() - started

    def to_the_end(self) -> float:
        """Finish the epoch; return the seconds of the last publication and report."""
        self.push(LAST - 8)
        self.blend(LAST - 8)
        self.push(8)
        started = time.perf_counter()
        self.blend(8)
        while int(self.ledger.hget(LedgerKeys(self.job).work, "finished")) < 1:
            self.shard.turn()
        seconds = time.perf_counter() - started
        self.push(8)
        self.blend(8)
        return seconds


def slowest(server: Any) -> dict[str, float]:
    """Return the longest duration of each script and of other commands, in ms."""

    names = {}
    folder = resources.files("vcasgd.store").joinpath("scripts")
    for kind in ("ledger", "tensors"):
        for entry in folder.joinpath(kind).iterdir():
            name = entry.name.removesuffix(".lua")
            digest = hashlib.sha1(script_source(f"{kind}/{name}").encode()).hexdigest()
            names[digest] = f"{name}.lua"
    longest: dict[str, float] = {}
    for entry in server.slowlog_get(-1):
        words = entry["command"].decode(errors="replace").split(" ")
        name = names.get(words[1], "") if words[0].upper() == "EVALSHA" else words[0].upper()
        longest[name] = max(longest.get(name, 0.0), entry["duration"] / 1000)
    return longest
