"""What a worker does beside training: prepare itself, make the first snapshot, evaluate."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from vcasgd.errors import NotFound, PackageError, SnapshotMissing
from vcasgd.learning.shards import ShardRange
from vcasgd.logging import identify
from vcasgd.session.script import ScriptTask, load
from vcasgd.storage.objects import Storage
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import Evaluation, JobRecord
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.sharded import ShardedSnapshots, Whole, check_nodes, versions_of
from vcasgd.store.tensors.snapshot import Meta, Record, encode_integers, epoch_pin
from vcasgd.store.tensors.snapshots import Snapshots
from vcasgd.task.package import unpack
from vcasgd.worker.context import WorkerContext, WorkInterrupted
from vcasgd.worker.learner import Learner


class Chores:
    """Raises as :class:`~vcasgd.worker.trainer.Trainer` does, and
    :class:`~vcasgd.errors.PackageError`, :class:`~vcasgd.errors.StorageUnavailable` and
    :class:`~vcasgd.errors.SpecError` while preparing."""

    def __init__(self, desk: WorkerContext) -> None:
        self._desk = desk
        self._learner: Learner | None = None
        self._script: ScriptTask | None = None

    @property
    def prepared(self) -> bool:
        return self._learner is not None

    def learner(self) -> Learner:
        """Fetches the user's code, builds the model, and opens the links, each once; a script that
        has ended is begun anew."""
        if self._script is not None and self._script.ended:
            self._learner = None
        if self._learner is None or not self._desk.links.known:
            self._desk.doing = "preparing"
            job = self._desk.jobs.get(self._desk.job)
            # a worker is a process of its own
            identify(request=job.request)
            learner = self._learner or self._built(job)
            self._desk.tuning = job.spec.tuning
            if job.facts is not None:
                learner.check_against(job.facts)
                self._desk.open_links(learner.cut(job.facts.shards))
            self._learner = learner
        return self._learner

    def reading(self) -> dict[str, float]:
        """For the heartbeat: how the data set was read, if it says so."""
        return self._learner.reading() if self._learner else {}

    def close(self) -> None:
        """Ends the user's script, if the task is one."""
        if self._script is not None:
            self._script.close()

    def _built(self, job: JobRecord) -> Learner:
        task = load(job.spec.task, job.spec.args, self._code(job))
        self._script = task if isinstance(task, ScriptTask) else None
        return Learner(job.spec, task, best_device())

    def _code(self, job: JobRecord) -> Path:
        """The folder with the user's code, unpacked once on each machine."""
        settings = self._desk.settings
        cache = settings.cache_dir or _default_cache()
        if not (cache / job.package).is_dir():
            storage = Storage(settings.required("storage_url"))
            try:
                data = storage.get(f"packages/{job.package}.zip")
            except NotFound as error:
                raise PackageError(f"package {job.package[:12]} is not in the storage") from error
            unpack(data, job.package, cache)
        return cache / job.package

    def initialise(self, lease: Lease) -> None:
        """Makes the first snapshot, and finds out what only the user's code knows."""
        desk, learner = self._desk, self.learner()
        desk.doing = "making the first snapshot"
        known = desk.jobs.get(desk.job).facts
        facts = known or learner.facts(len(desk.nodes))
        check_nodes(desk.nodes, facts.shards, desk.job)
        # not what the learner holds, which is trained already where the model was lost
        floats, integers = learner.initial()
        for part in learner.cut(facts.shards).parts:
            self._install(part, floats, integers, first=known is None)
        desk.leases.report_facts(lease, facts.to_dict())
        desk.finish(lease)

    def _install(self, part: ShardRange, floats: Tensor, integers: Tensor, *, first: bool) -> None:
        """One shard's first snapshot, where there is none."""
        desk = self._desk
        learner = self.learner()
        snapshots = Snapshots(desk.nodes[part.shard], TensorKeys(desk.job, part.shard))
        # later on, an empty tensors server may just have come back; only a parameter server that
        # has no model either, and has taken over therefore, is helped by starting anew
        if not first and not snapshots.taken_over():
            return
        meta = Meta(
            version=0,
            token=0,
            floats=part.floats,
            parameters=part.parameters,
            layout=learner.layout_digest,
            integers=encode_integers(integers) if part.shard == 0 else "",
            created_at=time.time(),
            halves=learner.halves,
        )
        snapshots.install(0, meta, Record(), part.of(floats))

    def evaluate(self, lease: Lease) -> None:
        """The model at the end of an epoch on the validation split."""
        desk, learner = self._desk, self.learner()
        desk.doing = f"evaluating epoch {lease.number}"
        whole, floats = self._pinned(lease)
        started = time.monotonic()
        metrics = learner.evaluate(
            floats,
            whole[0].meta.integer_vector(),
            should_stop=lambda: not desk.may_go_on(lease),
            on_step=desk.on_step,
        )
        if not metrics:
            raise WorkInterrupted
        seconds = time.monotonic() - started
        self._report(
            lease,
            Evaluation(
                epoch=lease.number,
                version=whole[0].meta.version,
                metrics=metrics,
                worker=desk.name,
                seconds=seconds,
                at=time.time(),
                versions=versions_of(whole),
            ),
        )
        desk.finish(lease)

    def _pinned(self, lease: Lease) -> tuple[Whole, Tensor]:
        """The snapshots of an epoch's end; where one was lost, the present one takes its place."""
        desk, name = self._desk, epoch_pin(lease.number)
        facts = desk.jobs.get(desk.job).facts
        assert facts is not None
        snapshots = ShardedSnapshots(desk.nodes, desk.job, self.learner().cut(facts.shards))
        while desk.may_go_on(lease):
            try:
                return snapshots.fetch_pinned(name)
            except SnapshotMissing:
                snapshots.want_pin(name)
                desk.pause()
        raise WorkInterrupted

    def _report(self, lease: Lease, result: Evaluation) -> None:
        desk = self._desk
        fields = {key: value for key, value in asdict(result).items() if key != "epoch"}
        if not desk.leases.report_evaluation(lease, fields):
            return
        shown = ", ".join(
            f"{name} {value:.4f}" for name, value in result.metrics.items() if name != "count"
        )
        desk.jobs.event(
            desk.job,
            "evaluated",
            f"epoch {result.epoch}: {shown}",
            epoch=result.epoch,
            version=result.version,
            metrics=result.metrics,
        )


def best_device() -> str:
    """The GPU of this machine, where torch can use one, else its processor."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _default_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"vcasgd-packages-{os.getuid()}"
