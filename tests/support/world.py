"""A job on real servers whose workers and controller are simulated by the test.

As in ``vcasgd/chaos/task/audit.py`` each sample owns one coordinate, and an update adds 1 to
the coordinates of its samples, so the vector counts how often each sample was applied.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from support.exact import counts_after
from vcasgd.controller.jobs.lifecycle import JobLifecycle
from vcasgd.errors import SnapshotMissing
from vcasgd.learning.applied_record import SubtaskSet
from vcasgd.learning.encodings.encoder import Encoder, codec_of
from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.learning.length import plan_for
from vcasgd.learning.shards import Cut
from vcasgd.parameter_server.shard import Shard
from vcasgd.spec.job import JobSpec
from vcasgd.storage.checkpoints import StoredCheckpoint
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys, TensorKeys
from vcasgd.store.ledger.job import JobState, ModelFacts
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases, Wait
from vcasgd.store.ledger.leases import WorkKind as Work
from vcasgd.store.ledger.servers import Accounts
from vcasgd.store.tensors.chunks import CHUNK_BYTES
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import Meta, Record, encode_integers
from vcasgd.store.tensors.snapshot_store import STATE, SnapshotStore
from vcasgd.store.tensors.updates import PushResult, UpdateReader, UpdateSender

COUNTING = {"rule": "async-local-sgd", "eta": 1.0}
#: A worker's report of an evaluation.
RESULT = {"version": 3, "metrics": {"accuracy": 0.5}, "worker": "a", "seconds": 1.0, "at": 2.0}
#: Samples in a local step of the task.
BATCH = 2


def blocks_of(*subtasks: int) -> dict[int, bytes]:
    """Return the blocks of a set of subtasks."""
    found = SubtaskSet()
    for subtask in subtasks:
        found.add(subtask)
    return found.blocks


def spec_of(**fields: Any) -> JobSpec:
    length = {} if {"max_samples", "max_steps"} & fields.keys() else {"epochs": 2}
    return JobSpec.parse(
        {"name": "job", "task": "t:T", "subtasks_per_epoch": 3, **length, **fields}
    )


def lease_of(answer: Lease | Wait) -> Lease:
    assert isinstance(answer, Lease), answer
    return answer


def layout_of(samples: int, *, table: bool = False) -> Layout:
    """Model with one parameter per sample, as a ``table`` or not, a statistic and a counter."""
    return Layout(
        (
            TensorEntry("count", (samples, 1) if table else (samples,), TensorKind.PARAMETER, 0),
            TensorEntry("mean", (), TensorKind.STATISTIC, samples),
            TensorEntry("steps", (), TensorKind.INTEGER, 0),
        )
    )


class World:
    """A job on two servers, which are emptied first."""

    def __init__(
        self,
        ledger: RedisClient,
        tensors: RedisClient,
        storage: Path,
        *,
        samples: int = 12,
        running: bool = True,
        table: bool = False,
        **fields: Any,
    ) -> None:
        self.ledger, self.tensors = ledger, tensors
        ledger.flushall()
        self.jobs = Jobs(ledger)
        self.storage = Storage(f"file://{storage}")
        self.layout = layout_of(samples, table=table)
        self.spec = spec_of(**{"update": COUNTING, **fields})
        self.plan = plan_for(self.spec, samples, BATCH)
        self.codec = codec_of(self.spec.update)
        self.job = self.jobs.submit(self.spec, "0" * 64).id
        self.keys = TensorKeys(self.job)
        self.ledger_keys = LedgerKeys(self.job)
        self.snapshots = SnapshotStore(tensors, self.keys)
        self.sender = UpdateSender(tensors, self.keys)
        self.reader = UpdateReader(tensors, self.keys)
        self.accounts = Accounts(ledger, self.job)
        self.checkpoints = ModelCheckpoints(self.storage, self.job)
        self.now = 1000.0
        self._tokens = itertools.count(1)
        self._named = itertools.count(1)
        if running:
            self.initialise()

    # -- initialization -----------------------------------------------------------------------

    def initialise(self) -> None:
        """Start the job, as the first worker and the controller do."""
        lease = self.leases("first").acquire()
        assert isinstance(lease, Lease)
        assert lease.kind is Work.INITIALISE
        assert self.install()
        assert self.leases("first").report_facts(lease, self.facts().to_dict())
        if self.jobs.get(self.job).state is JobState.STARTING:
            JobLifecycle(
                self.job,
                ledger=self.ledger,
                nodes=[self.tensors],
                storage=self.storage,
                writer=ThreadPoolExecutor(),
                clock=lambda: self.now,
            ).step()

    def install(self) -> bool:
        floats = torch.zeros(self.layout.floats)
        return self.snapshots.install(0, self.first_meta(), Record(), floats)

    def first_meta(self) -> Meta:
        """Description of the first snapshot."""
        return Meta(
            version=0,
            token=0,
            floats=self.layout.floats,
            parameters=self.layout.parameters,
            layout=self.layout.digest(),
            halves=self.codec.name == "bfloat16",
            integers=encode_integers(torch.zeros(1, dtype=torch.int64)),
        )

    def facts(self) -> ModelFacts:
        return ModelFacts(
            self.plan.samples,
            1,
            self.layout.to_json(),
            self.plan.order_digest(),
            batch_size=BATCH,
            subtasks_per_epoch=self.plan.subtasks_per_epoch,
        )

    # -- the parts ----------------------------------------------------------------------------

    def shard(
        self,
        token: int | None = None,
        *,
        ledger: RedisClient | None = None,
        tensors: RedisClient | None = None,
        job_secret: str | None = None,
        executor: Executor | None = None,
        readers: Executor | None = None,
    ) -> Shard:
        """Return a parameter server's shard, by default with a new token."""
        return Shard(
            self.jobs.get(self.job),
            self.new_token() if token is None else token,
            tensors=tensors or self.tensors,
            ledger=ledger or self.ledger,
            checkpoints=self.checkpoints,
            job_secret=job_secret,
            clock=lambda: self.now,
            executor=executor,
            readers=readers,
        )

    def started_shard(self, token: int | None = None, **options: Any) -> Shard:
        """Return a shard after its first turn; ``options`` as those of :meth:`shard`."""
        shard = self.shard(token, **options)
        shard.turn()
        return shard

    def new_token(self) -> int:
        """Return a new token for a parameter server."""
        return next(self._tokens)

    def leases(self, worker: str, seconds: float = 60.0) -> Leases:
        return Leases(self.ledger, self.job, worker, seconds)

    def expire(self, *pieces: str) -> None:
        """Let the named leases expire, by default all."""
        found = pieces or self.ledger.zrange(self.ledger_keys.leases, 0, -1)
        for piece in found:
            self.ledger.zadd(self.ledger_keys.leases, {piece: 1}, xx=True)

    def lose_tensors(self) -> None:
        """Empty the tensors server, as a restart does."""
        self.tensors.flushdb()

    def checkpoint(self) -> StoredCheckpoint:
        """Write a checkpoint of the present snapshot, as the controller does."""
        snapshot = self.snapshots.read()
        floats = partial(self.snapshots.pieces, snapshot.meta)
        state = partial(self.snapshots.pieces, snapshot.meta, STATE)
        rule_state = state if snapshot.meta.rule_state else None
        return self.checkpoints.write((snapshot,), self.layout, floats, rule_state)

    # -- updates ------------------------------------------------------------------------------

    def encoder(self) -> Encoder:
        """Return the encoder of a new worker, without a residual."""
        layout = self.layout
        (part,) = Cut(layout.floats, layout.parameters, 1).parts
        return Encoder(self.spec.update, layout, part)

    def delta(self, subtask: int, start: int, stop: int) -> Tensor:
        delta = torch.zeros(self.layout.floats)
        if subtask < self.plan.total_subtasks and start < stop <= self.plan.size(subtask):
            delta[torch.from_numpy(self.plan.indices(subtask, start, stop).copy())] = 1.0
        return delta

    def update(
        self,
        subtask: int,
        start: int,
        stop: int,
        token: int,
        *,
        vector: Tensor | None = None,
        payload: bytes | memoryview | None = None,
        last: bool = False,
        **changes: Any,
    ) -> tuple[Header, memoryview]:
        """Return an honest worker's update with ``changes`` to its header."""
        if payload is None:
            whole = self.delta(subtask, start, stop) if vector is None else vector
            encoded = self.encoder().encode(whole, last=last)
            changes.setdefault("codec", encoded.codec)
            payload = memoryview(b"".join(encoded.chunks(CHUNK_BYTES)))
        fields = {
            "update": f"u{next(self._named)}",
            "worker": "worker",
            "subtask": subtask,
            "start": start,
            "stop": stop,
            "base": 0,
            "token": token,
            "codec": self.spec.update.codec,
            "size": len(payload),
            "checksum": xxh3_64_intdigest(payload),
            "layout": self.layout.digest(),
            "integers": encode_integers(torch.tensor([stop])),
            "loss_sum": float(stop - start),
        }
        return Header(**{**fields, **changes}), memoryview(payload)

    def push(
        self, subtask: int, start: int, stop: int, token: int = 1, **changes: Any
    ) -> tuple[Header, PushResult]:
        header, payload = self.update(subtask, start, stop, token, **changes)
        return header, self.sender.push(header, self.plan.epoch_of(subtask), payload)

    def apply(self, shard: Shard, *interval: int, **changes: Any) -> None:
        """Push an update as :meth:`push` does, and let a shard make a turn."""
        self.push(*interval, **changes)
        shard.turn()

    def receive(self, header: Header, size: int) -> bytes:
        """Return the bytes that the parameter server receives of a payload."""
        payload = memoryview(bytearray(size))
        for _ in self.reader.receive(header, payload):
            pass
        return bytes(payload)

    def inject(self, header: Header, payload: bytes | memoryview) -> None:
        """Write an update to the stream without the script, as only a broken worker does."""
        if len(payload):
            self.tensors.set(self.keys.payload_chunk(header.update, 0), bytes(payload))
        self.tensors.xadd(self.keys.stream, {"h": header.model_dump_json()})

    def fate(self, header: Header) -> str:
        epoch = self.plan.epoch_of(header.subtask)
        asked = (header.subtask, epoch, header.stop, header.update)
        return self.sender.status([asked]).outcomes[0]

    # -- results -----------------------------------------------------------------------------

    def vector(self) -> Tensor:
        floats = torch.empty(self.layout.floats)
        self.snapshots.fetch(floats)
        return floats

    def counts(self) -> list[float]:
        """Return how often the present snapshot contains each sample."""
        counts: list[float] = self.vector()[: self.plan.samples].tolist()
        return counts

    def expected_counts(self, record: Record) -> list[float]:
        """Return how often a snapshot with this record should contain each sample."""
        counts = torch.zeros(self.layout.floats)
        counts[: self.plan.samples] = torch.tensor(counts_after(self.plan, record.finished))
        for subtask, stop in self.positions(record).items():
            counts += self.delta(subtask, 0, stop)
        expected_counts: list[float] = counts[: self.plan.samples].tolist()
        return expected_counts

    def positions(self, record: Record | None = None) -> dict[int, int]:
        """Return the positions in unfinished epochs, of the present record by default."""
        applied = (record or self.snapshots.read().record).applied(self.plan)
        done = {subtask: self.plan.size(subtask) for subtask in applied.done}
        return {**applied.positions, **done}

    def assert_exact(self) -> None:
        """Check that the parameters match the applied record, sample by sample."""
        floats = torch.empty(self.layout.floats)
        snapshot = self.snapshots.fetch(floats)
        assert floats[: self.plan.samples].tolist() == self.expected_counts(snapshot.record)

    @property
    def complete(self) -> bool:
        try:
            return self.snapshots.read().record.finished == self.plan.epochs
        except SnapshotMissing:
            return False

    def rollbacks(self) -> int:
        """Return the rollbacks before the present snapshot; 0 without one."""
        try:
            return self.snapshots.read().meta.rollbacks
        except SnapshotMissing:
            return 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.jobs.events(self.job) if event["kind"] == kind]

    def rejected(self) -> dict[str, int]:
        return dict(self.snapshots.read().meta.totals.rejected)

    def tensor_keys(self, prefix: str = "") -> set[str]:
        """Return the job's keys on the tensors server, without their common prefix."""
        found = self.tensors.scan_iter(match=f"{self.keys.prefix}{prefix}*", count=1000)
        return {key.decode().removeprefix(self.keys.prefix) for key in found}

    def done_in_ledger(self) -> list[int]:
        """Return the subtasks of unfinished epochs that are applied in every shard."""
        work = self.jobs.work(self.job)
        reports = self.ledger.hgetall(self.ledger_keys.shards)
        stored = self.ledger.hgetall(self.ledger_keys.blocks)
        total = range(work["finished"] * work["per_epoch"], work["total"])
        shards = int(self.ledger.hget(self.ledger_keys.work, "shards") or 1)
        everywhere = set(total)
        for shard in range(shards):
            prefix = b"%d:" % shard
            blocks = {
                int(name[len(prefix) :]): bits
                for name, bits in stored.items()
                if name.startswith(prefix)
            }
            finished = int(reports.get(prefix + b"finished", 0)) * work["per_epoch"]
            everywhere &= {*SubtaskSet(blocks), *range(finished)}
        return sorted(everywhere)

    def partition(self) -> Partition:
        return Partition.of(self)


#: ``make_world(samples=12, epochs=2, …)``: see :class:`World`.
MakeWorld = Callable[..., World]


@dataclass(frozen=True)
class Partition:
    """States of the leased subtasks of unfinished epochs in the ledger."""

    done: Counter[int]
    open: Counter[int]
    leased: Counter[int]
    expected: range

    @classmethod
    def of(cls, world: World) -> Partition:
        keys, ledger = world.ledger_keys, world.ledger
        work = world.jobs.work(world.job)
        leased = _trained(ledger.zrange(keys.leases, 0, -1))
        assert leased == _trained(ledger.hkeys(keys.holders))
        done = world.done_in_ledger()
        first = work["finished"] * work["per_epoch"]
        # acquire.lua drops those that are done.
        opened = _trained(ledger.zrange(keys.open, 0, -1))
        waiting = [each for each in opened if each >= first and each not in set(done)]
        highest = max(work["next"], int(ledger.hget(keys.counters, "highest") or 0))
        # After a shard went back, the next subtask is one that has been leased before.
        again = range(max(first, work["next"]), highest)
        return cls(
            Counter(done),
            Counter([*waiting, *(set(again) - set(done) - set(leased) - set(waiting))]),
            Counter(leased),
            range(first, highest),
        )

    def assert_whole(self) -> None:
        """Check that each subtask is in exactly one state.

        A subtask that was trained without a lease may be done before it is leased.
        """
        ahead = Counter(each for each in self.done if each >= self.expected.stop)
        assert self.done - ahead + self.open + self.leased == Counter(self.expected)


def _trained(pieces: Iterable[bytes]) -> list[int]:
    found = (piece.decode().split(":") for piece in pieces)
    return sorted(int(number) for kind, number in found if kind == "train")
