"""Prepares a worker: fetches the user's code, builds the model, makes the first snapshot."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from vcasgd.errors import (
    DataError,
    MachineDiffers,
    NotFound,
    PackageError,
    SpecError,
    StoreFull,
    VcasgdError,
)
from vcasgd.learning.encodings.encoder import codec_for
from vcasgd.learning.layout import Layout
from vcasgd.learning.sharded_model import is_sharded
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Floats, MappedVector, read_tensors
from vcasgd.local_files import default_cache_folder, temporary_folder
from vcasgd.logging import identify
from vcasgd.schemas.base import MAX_NAME_LENGTH
from vcasgd.session.script import LoopInThread, load
from vcasgd.spec.job import JobSpec
from vcasgd.spec.sections import StartFrom
from vcasgd.storage.base_files import prepare_base
from vcasgd.storage.checkpoints import Checkpoints
from vcasgd.storage.model_checkpoints import TensorsOfFile
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import JobRecord, ModelFacts
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.snapshot import Meta, Record, encode_integers
from vcasgd.store.tensors.snapshot_index import nodes_of
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.task.package import unpack
from vcasgd.task.task import Task
from vcasgd.worker import WorkerContext
from vcasgd.worker.exchange import Exchange
from vcasgd.worker.gpus import (
    OwnGpu,
    best_device,
    flops_per_sample_of,
    ranks_of,
    why_apart,
    why_one_process,
)
from vcasgd.worker.job_environment import set_variables, use_packages
from vcasgd.worker.learner import Learner
from vcasgd.worker.leases import WorkerStatus, WorkInterrupted
from vcasgd.worker.ranked_learner import LeadingLearner
from vcasgd.worker.ranks import Ranks

#: Start of the names of tensors in checkpoints that aren't the model's.
_OWN = "vcasgd:"

log = logging.getLogger(__name__)


@dataclass
class Setup:
    """Builds the worker's :class:`Learner`. Methods raise :class:`~vcasgd.errors.PackageError`,
    :class:`~vcasgd.errors.StorageUnavailable`, :class:`~vcasgd.errors.DataError`,
    :class:`~vcasgd.errors.SetupFailed`, :class:`~vcasgd.errors.SpecError`, and
    :class:`~vcasgd.errors.MachineDiffers`, besides what :class:`~vcasgd.worker.trainer.Trainer`
    raises.

    ``leaving()`` is true once the worker has to stop. ``build`` replaces the learner of the job's
    own task, for measurements. The code runs in ``folder``.
    """

    context: WorkerContext
    exchange: Exchange
    status: WorkerStatus
    leaving: Callable[[], bool]
    gpu: OwnGpu
    build: Callable[[JobRecord], Learner] | None = None
    folder: Path | None = None
    _learner: Learner | None = field(default=None, init=False)
    _script: LoopInThread | None = field(default=None, init=False)
    #: Facts with this machine's choice of GPUs, as long as the job has none.
    _chosen: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def prepared(self) -> bool:
        """True once there is a learner."""
        return self._learner is not None

    def learner(self) -> Learner:
        """Return the learner; build it and connect to the shards first if that isn't done yet.

        A script that has ended starts again.
        """
        if self._script is not None and self._script.ended and self._learner is not None:
            self._learner.close()
            self._learner = None
        if self._learner is None or not self.exchange.is_open:
            self.status.doing = "preparing"
            job = self.context.jobs.get(self.context.job)
            # A worker is a process of its own.
            identify(request=job.request)
            learner = self._prepare(job)
            if job.facts is not None:
                cut = learner.cut(job.facts.shards)
                update, layout = job.facts.update(job.spec), learner.layout
                self.exchange.open(
                    *(cut, update, layout, learner.max_unapplied),
                    nodes=job.facts.store_nodes,
                    adopts=learner.adopts_own_copy,
                    device=learner.device,
                    mapped=learner.maps_vectors,
                )
            self._learner = learner
        return self._learner

    def _prepare(self, job: JobRecord) -> Learner:
        """Return a learner of the same job as the first worker's.

        Raises :class:`MachineDiffers` for what the first worker's machine had no fault with.
        """
        try:
            build = self.build or self._build_from_package
            learner = self._learner or build(job)
            if job.facts is not None and self._chosen.get("gpus", job.facts.gpus) != job.facts.gpus:
                # Another machine was faster, and has chosen otherwise.
                self._close(learner)
                self._learner = None
                del learner
                free_memory()
                learner = build(job)
            if job.facts is not None:
                learner.check_against(job.facts)
        except (SpecError, DataError) as error:
            if job.facts is None:
                raise
            raise MachineDiffers(
                f"{error.message}, although another machine could prepare the job",
                remedy=error.remedy,
                **error.details,
            ) from error
        return learner

    def reading(self) -> dict[str, float]:
        """Return the data set's counters of its reads; empty if it has none."""
        return self._learner.reading() if self._learner else {}

    def close(self) -> None:
        """End the loader processes, and the user's script, if the task is one."""
        self._close(self._learner)

    def _build_from_package(self, job: JobRecord) -> Learner:
        context, on_progress = self.context, self._progress
        code = self._code_of(job)
        # After the package is fetched: a job may set credentials of its own for its data.
        set_variables(context, job.spec, on_progress)
        use_packages(job.spec, job.package, code, context.settings, on_progress)
        prepare_base(job.spec.base, context.settings, on_progress)
        self._chosen = {}
        spec = job.spec if job.facts is None else job.spec.with_gpus(job.facts.gpus)
        if spec.workers.gpus is None:
            learner = self._with_chosen_gpus(spec, code)
        else:
            learner = self._learner_of(spec, self._load(spec, code), code)
        self.status.ranks = size = ranks_of(learner.spec.workers, self.gpu.count)
        # Of the machine's GPUs, so that a learner that is built again has the same.
        self.status.visible_gpus = self.gpu.of_several(size).visible(size)
        return learner

    def _load(self, spec: JobSpec, code: Path) -> Task:
        folder, self.folder = self.folder, None
        if folder is not None:
            # Paths are as in the folder of the code, and what it writes there is this worker's:
            # it may resume from what it finds, and replace its own files.
            shutil.copytree(code, folder, dirs_exist_ok=True)
            os.chdir(folder)
        task = load(spec.task, spec.args, code)
        self.status.flops_per_sample = flops_per_sample_of(task)
        self._script = task if isinstance(task, LoopInThread) else None
        return task

    def _learner_of(self, spec: JobSpec, task: Task, code: Path) -> Learner:
        size = ranks_of(spec.workers, self.gpu.count)
        if size == 1:
            return Learner(spec, task, best_device())
        gpu, seconds = self.gpu.of_several(size), self.context.settings.lease_seconds
        ranks = Ranks(size, spec, code, gpu, seconds, self._progress)
        return LeadingLearner(spec, task, best_device(), ranks)

    def _with_chosen_gpus(self, spec: JobSpec, code: Path) -> Learner:
        """Return a learner of a job's first machine, with one of its GPUs or with all."""
        one, why = spec.with_gpus(1), ""
        if self.gpu.count > 1:
            why, facts = self._why_apart(one, code)
            free_memory()
            if not why:
                together, why = self._together(spec.with_gpus("all"), code, facts)
                if together is not None:
                    return self._choose(together, "")
                free_memory()
        return self._choose(self._learner_of(one, self._load(one, code), code), why)

    def _why_apart(self, spec: JobSpec, code: Path) -> tuple[str, ModelFacts | None]:
        """Return why each GPU should be a worker; empty if all should be one.

        Also returns the facts of a learner with one GPU; None if the model is in parts.
        """
        why = why_one_process(spec, volunteer=self.context.settings.volunteer)
        if why:
            return why, None
        task = self._load(spec, code)
        if is_sharded(task):
            self._close(None)
            return "", None
        alone = self._learner_of(spec, task, code)
        try:
            alone.findings.count_samples(self._progress)
            facts = alone.facts(len(self.context.nodes))
            sparse = alone.findings.has_sparse_gradients
            return why_apart(spec, facts, self.gpu.count, sparse=sparse), facts
        finally:
            self._close(alone)

    def _together(
        self, spec: JobSpec, code: Path, facts: ModelFacts | None
    ) -> tuple[Learner | None, str]:
        """Return a learner of all GPUs if its processes work together, or why they don't."""
        learner = None
        try:
            learner = self._learner_of(spec, self._load(spec, code), code)
            division = learner.findings.division
            if not division.of_whole_loss:
                if facts is not None and isinstance(learner, LeadingLearner):
                    learner.try_ranks(facts)
                return learner, ""
            why = division.why
        except VcasgdError as error:
            if facts is None:
                # No process can have the whole model.
                raise
            log.warning("the GPUs of this machine don't train together", exc_info=True)
            why = error.message
        self._close(learner)
        return None, why

    def _choose(self, learner: Learner, why: str) -> Learner:
        gpus, text, end = learner.spec.workers.gpus, "", "; set workers.gpus to choose"
        if self.gpu.count > 1:
            how = "train as one worker" if gpus == "all" else f"are a worker each, because {why}"
            text = f"GPUs of a machine {how}"[: MAX_NAME_LENGTH - len(end)] + end
        self._chosen = {"gpus": gpus, "gpus_why": text}
        return learner

    def _close(self, learner: Learner | None) -> None:
        if learner is not None:
            learner.close()
        if self._script is not None:
            self._script.close()

    def _progress(self) -> None:
        """Report that a long step goes on. Raises :class:`WorkInterrupted` if the worker leaves."""
        if self.leaving():
            raise WorkInterrupted

    def _code_of(self, job: JobRecord) -> Path:
        """Return the folder with the user's code, which is unpacked once on each machine."""
        settings = self.context.settings
        cache = settings.cache_dir or default_cache_folder("packages")
        if not (cache / job.package).is_dir():
            storage = Storage(settings.required("storage_url"))
            try:
                data = storage.get(f"packages/{job.package}.zip")
            except NotFound as error:
                raise PackageError(f"package {job.package[:12]} is not in the storage") from error
            unpack(data, job.package, cache)
        return cache.absolute() / job.package

    # -- first snapshot ----------------------------------------------------------------------------

    def initialise(self, lease: Lease) -> None:
        """Make the first snapshot, and report the facts that only the user's code knows."""
        context, learner = self.context, self.learner()
        self.status.doing = "making the first snapshot"
        reported = context.jobs.get(context.job).facts
        if reported is None:
            learner.findings.count_samples(self._progress)
            if (plan := learner.plan).epochs > 1:
                # A sampler that draws another number of samples is an error now, not in epoch 2.
                plan.indices(plan.subtasks_per_epoch, 0, 1)
        volunteer = context.settings.volunteer
        facts = reported or learner.facts(len(context.nodes), verified=volunteer)
        if reported is None:
            learner.rehearse(self._progress)
        nodes = nodes_of(context.nodes, facts.store_nodes, facts.shards, context.job)
        # Not the learner's present model, which is already trained if the snapshot was lost.
        floats, integers = self._starting_vectors(learner) or learner.initial()
        rates = []
        for part in learner.cut(facts.shards).parts:
            started_at = time.monotonic()
            self._install(nodes[part.shard], part, floats, integers, first=reported is None)
            rates.append(4 * part.floats / (time.monotonic() - started_at))
        if reported is None and facts.takes_turns:
            # The fastest one says the most of the link.
            facts = replace(facts, codec=codec_for(max(rates)))
        if reported is None:
            facts = replace(facts, **self._chosen)
        context.leases.report_facts(lease, facts.to_dict())
        if (
            reported is None
            and self._script
            and {"own-values", "hooks-on-workers"} & {*facts.notes}
        ):
            # What the loop has counted includes batches that were only compared: it starts again.
            self._script.close()

    def _starting_vectors(self, learner: Learner) -> tuple[Floats, Tensor] | None:
        source = learner.spec.start_from
        if source is None:
            return None
        storage = Storage(self.context.settings.required("storage_url"))
        code = self._code_of(self.context.jobs.get(self.context.job))
        mapped = learner.maps_vectors
        return starting_vectors(source, learner.layout, storage, code, mapped=mapped)

    def _install(
        self,
        node: RedisClient,
        part: ShardRange,
        floats: Floats,
        integers: Tensor,
        *,
        first: bool,
    ) -> None:
        """Install one shard's first snapshot, unless it has a snapshot."""
        learner = self.learner()
        snapshots = SnapshotStore(node, TensorKeys(self.context.job, part.shard))
        # Later on, an empty tensors server may just have restarted. Starting over helps only a
        # parameter server that has no model either, and it has taken over then. Beside a model,
        # workers may not write one.
        if not first and (not snapshots.fence() or snapshots.exists()):
            return
        meta = Meta(
            version=0,
            token=0,
            floats=part.floats,
            parameters=part.parameters,
            layout=learner.findings.layout_digest,
            integers=encode_integers(integers) if part.shard == 0 else "",
            created_at=time.time(),
            halves=learner.halves,
        )
        try:
            snapshots.install(0, meta, Record(), part.of(floats))
        except StoreFull:
            self.status.doing = (
                "waiting for memory to store the first model: raise VCASGD_TENSORS_MEMORY_MB, add "
                "store nodes, or end other jobs"
            )
            raise


# -- weights to start with ---------------------------------------------------------------------


def starting_vectors(
    source: StartFrom, layout: Layout, storage: Storage, code: Path, *, mapped: bool = False
) -> tuple[Floats, Tensor]:
    """Return the vectors, float32 [floats] and int64 [integers], of the weights to start with.

    ``code``: folder of the job's code. The first vector may be ``mapped``. Raises
    :class:`SpecError` if the weights don't exist or are those of another model,
    :class:`~vcasgd.errors.CheckpointDamaged`, and :class:`~vcasgd.errors.StorageUnavailable`.
    """
    with temporary_folder("vcasgd-weights-") as folder:
        try:
            tensors = TensorsOfFile(_file(source, storage, code, folder))
        except (SafetensorError, OSError, NotFound) as error:
            raise _refused(source, f"can't be read: {error}") from error
        return _vectors_of(source, layout, tensors, mapped=mapped)


def _vectors_of(
    source: StartFrom, layout: Layout, tensors: Mapping[str, Tensor], *, mapped: bool
) -> tuple[Floats, Tensor]:
    names = {name for name in tensors if not name.startswith(_OWN)}
    known = {entry.name for entry in layout.entries}
    if missing := sorted(known - names):
        raise _refused(source, f"has no {missing[0]}, which the model trains")
    if extra := sorted(names - known - {tensor.name for tensor in layout.base}):
        raise _refused(source, f"has {extra[0]}, and the model doesn't")
    try:
        floats: Floats = MappedVector(layout.floats) if mapped else torch.zeros(layout.floats)
        return floats, read_tensors(layout, tensors, floats)
    except ValueError as error:
        raise _refused(source, f"doesn't fit the model: {error}") from error


def _file(source: StartFrom, storage: Storage, code: Path, folder: Path) -> Path:
    if source.file is not None:
        return code / source.file
    assert source.job is not None, "checked"
    path = folder / "weights"
    with path.open("wb") as file:
        file.writelines(
            Checkpoints(storage, source.job).open_stream(source.checkpoint or "").chunks
        )
    return path


def _refused(source: StartFrom, problem: str) -> SpecError:
    return SpecError(
        f"start_from: {source} {problem}",
        remedy="name weights of the same model",
        field="start_from",
    )


def free_memory() -> None:
    """Free the memory of a model that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
