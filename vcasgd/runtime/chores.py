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
from vcasgd.package import unpack
from vcasgd.runtime.desk import Desk, Interrupted
from vcasgd.runtime.learner import Learner
from vcasgd.runtime.names import epoch_pin
from vcasgd.runtime.storage import Storage
from vcasgd.store.jobs import Evaluation, Job
from vcasgd.store.leases import Lease
from vcasgd.store.snapshots import Meta, Record, Snapshot, encode_integers
from vcasgd.task import load_task


class Chores:
    """Raises as :class:`~vcasgd.runtime.trainer.Trainer` does, and
    :class:`~vcasgd.errors.PackageError`, :class:`~vcasgd.errors.StorageUnavailable` and
    :class:`~vcasgd.errors.SpecError` while preparing."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._learner: Learner | None = None

    @property
    def prepared(self) -> bool:
        return self._learner is not None

    def learner(self) -> Learner:
        """Fetches the user's code and builds the model, once."""
        if self._learner is None:
            self._desk.doing = "preparing"
            job = self._desk.jobs.get(self._desk.job)
            learner = Learner(job.spec, load_task(job.spec.task, job.spec.args, self._code(job)),
                              "cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
            if job.facts is not None:
                learner.check_against(job.facts)
            self._learner = learner
        return self._learner

    def _code(self, job: Job) -> Path:
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
        facts = learner.facts()
        learner.check_against(facts)
        # not what the learner holds, which is trained already where the model was lost
        floats, integers = learner.initial()
        meta = Meta(
            version=0,
            token=0,
            floats=learner.layout.floats,
            parameters=learner.layout.parameters,
            layout=learner.layout_digest,
            integers=encode_integers(integers),
            created_at=time.time(),
        )
        desk.snapshots.install(0, meta, Record(), floats)
        desk.leases.report_facts(lease, facts.to_dict())
        desk.finish(lease)
        desk.base_version = None

    def evaluate(self, lease: Lease) -> None:
        """The model at the end of an epoch on the validation split."""
        desk, learner = self._desk, self.learner()
        desk.doing = f"evaluating epoch {lease.number}"
        pinned, floats = self._pinned(lease)
        started = time.monotonic()
        metrics = learner.evaluate(
            floats,
            pinned.meta.integer_vector(),
            should_stop=lambda: not desk.may_go_on(lease),
            on_step=desk.on_step,
        )
        if not metrics:
            raise Interrupted
        seconds = time.monotonic() - started
        self._report(
            lease,
            Evaluation(
                lease.number, pinned.meta.version, metrics, desk.name, seconds, at=time.time()
            ),
        )
        desk.finish(lease)

    def _pinned(self, lease: Lease) -> tuple[Snapshot, Tensor]:
        """The snapshot of an epoch's end; where it was lost, the present one takes its place."""
        desk, name = self._desk, epoch_pin(lease.number)
        while desk.may_go_on(lease):
            try:
                return desk.snapshots.fetch_pinned(name)
            except SnapshotMissing:
                desk.snapshots.want_pin(name)
                desk.pause()
        raise Interrupted

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


def _default_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"vcasgd-packages-{os.getuid()}"
