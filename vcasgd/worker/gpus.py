"""The GPU of a worker, one for each learner of a machine, and how much of it the training uses."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vcasgd.errors import SpecError
from vcasgd.gpus import VISIBLE, peak_flops, visible_gpus
from vcasgd.learning.layout import Layout, TensorKind
from vcasgd.spec.job import JobSpec, Workers
from vcasgd.spec.update import RoundsSpec
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.task.task import Task
from vcasgd.worker_names import learner_of

#: Samples of a batch that each GPU of a worker with several has at least, by default.
FEW_SAMPLES = 4
#: Seconds over which samples per second are measured; long enough for several push intervals.
RATE_SECONDS = 60.0


@dataclass(frozen=True)
class OwnGpu:
    """A learner's GPU: its place, from 0, among the ``count`` that the machine's workers may use.

    ``count`` is 0 on a machine without one. ``names`` are those of all in CUDA_VISIBLE_DEVICES.
    """

    place: int = 0
    count: int = 0
    names: tuple[str, ...] = ()

    def of_several(self, ranks: int) -> OwnGpu:
        """Return the first GPU of a worker with several, and make this process see that one."""
        if self.count < 2 or self.count <= ranks:
            return self
        gpu = replace(self, place=self.place * ranks % self.count)
        os.environ[VISIBLE] = self.names[gpu.place]
        return gpu

    def variables_of(self, rank: int) -> dict[str, str]:
        """Return the environment of a worker's further rank, which sees only its own GPU."""
        return {VISIBLE: self.names[(self.place + rank) % self.count]} if self.count else {}

    def visible(self, ranks: int) -> str | None:
        """Return CUDA_VISIBLE_DEVICES of all ranks of this worker; None without a GPU."""
        if not self.count:
            return None
        return ",".join(
            dict.fromkeys(self.names[(self.place + each) % self.count] for each in range(ranks))
        )

    @property
    def device(self) -> str:
        """The device for people."""
        if not self.count:
            return "cpu"
        name = ""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            name = f" ({torch.cuda.get_device_name()})"
        return f"GPU {self.place}{name}"


def choose_gpu(
    worker: str,
    *,
    environment: MutableMapping[str, str] = os.environ,
    count: Callable[[], int] = torch.cuda.device_count,
) -> OwnGpu:
    """Make this process see only one GPU, and return it; call it before CUDA is used.

    Learners of a machine take turns over its GPUs, of which those in ``CUDA_VISIBLE_DEVICES`` are
    used if it is set. ``count`` returns their number and doesn't start CUDA.
    """
    total = count()
    if total == 0:
        return OwnGpu()
    listed = environment.get(VISIBLE)
    numbers = listed.split(",") if listed else map(str, range(total))
    names = tuple(name.strip() for name in numbers)
    place = (learner_of(worker) - 1) % total
    environment[VISIBLE] = names[place]
    # The order of the numbers that NVIDIA's management library uses.
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return OwnGpu(place, total, names)


def ranks_of(workers: Workers, gpus: int) -> int:
    """Return the number of processes of a worker on a machine with ``gpus``, 1 unless chosen."""
    if workers.gpus == "all":
        return max(1, gpus)
    wanted = workers.gpus or 1
    return min(wanted, gpus) if gpus else wanted


def why_one_process(spec: JobSpec, *, volunteer: bool) -> str:
    """Return why a job needs a process for each worker, whatever its task; empty if it doesn't.

    ``volunteer``: the machine is one of a pool whose updates are verified.
    """
    if volunteer:
        return "updates of several processes can't be verified by repetition"
    if spec.skips_bad_samples:
        return "on_bad_sample: skip needs one process"
    if spec.tuning.learners_per_machine > 1:
        return "tuning.learners_per_machine lets several workers use a machine"
    return ""


def why_apart(spec: JobSpec, facts: ModelFacts, gpus: int, *, sparse: bool = False) -> str:
    """Return why each of a machine's ``gpus`` should be a worker; empty if all should be one.

    ``facts`` are those of a worker with one: together, they have to do what it does. ``sparse``:
    gradients are.
    """
    layout, batch = Layout.from_json(facts.layout), facts.batch_size or 1
    shared = isinstance(spec.update, RoundsSpec) and spec.batch == "job"
    sharing = gpus * (spec.workers.max if shared else 1)
    least = max(FEW_SAMPLES, facts.min_local_batch or 0)
    if batch < least * sharing:
        machines = f"up to {spec.workers.max} machines with " if shared else ""
        why = f", because {facts.min_local_batch_why}" if facts.min_local_batch_why else ""
        return (
            f"{machines}{gpus} GPUs share a batch of {batch}, and each GPU needs {least} samples"
            f"{why}"
        )
    if sparse:
        return "sparse gradients can't be added over processes"
    if facts.batch_weight is not None:
        return "parts of its batches don't count by their samples"
    if layout.beside:
        return f"{layout.beside[0]} beside the model would not travel"
    if layout.doubles:
        return f"{layout.doubles[0]} would travel as float32"
    latest = (each.name for each in layout.entries if each.kind is TensorKind.LATEST_FLOAT)
    name = next(latest, None)
    return f"versions would have the mean of {name}" if name else ""


def flops_per_sample_of(task: Task) -> float | None:
    """Return the task's ``flops_per_sample``. Raises :class:`SpecError` if it is invalid."""
    flops: Any = task.flops_per_sample
    if flops is None:
        return None
    number = isinstance(flops, int | float) and not isinstance(flops, bool)
    if not number or not 0 < flops < math.inf:
        raise SpecError(
            f"task: flops_per_sample is {flops!r}, not a number above 0", field="flops_per_sample"
        )
    return float(flops)


class Throughput:
    """Samples per second of a worker over :data:`RATE_SECONDS`, and the use of its GPU."""

    def __init__(self, gpu: OwnGpu, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu = gpu
        self._clock = clock
        #: Times and counts of samples, one for each push interval.
        self._counts: deque[tuple[float, int]] = deque()

    def fields(self, samples: int, flops_per_sample: float | None) -> dict[str, Any]:
        """Count all samples so far, and return the fields of a heartbeat as far as known."""
        rate = self._rate(samples)
        fields: dict[str, Any] = {"samples_per_second": rate}
        if self._gpu.count == 0:
            return fields
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            free, total = torch.cuda.mem_get_info()
            fields |= {"gpu_memory_bytes": total, "gpu_memory_free_bytes": free}
        # This process sees only its own.
        for gpu in visible_gpus()[:1]:
            peak = peak_flops(gpu.name)
            fields["gpu_utilization"] = gpu.utilization
            if rate is not None and flops_per_sample is not None and peak is not None:
                fields["flops_utilization"] = rate * flops_per_sample / peak
        return fields

    def _rate(self, samples: int) -> float | None:
        now = self._clock()
        # From the first push interval on: what precedes it is no training.
        if samples and (not self._counts or self._counts[-1][1] != samples):
            self._counts.append((now, samples))
        while self._counts and now - self._counts[0][0] > RATE_SECONDS:
            self._counts.popleft()
        if len(self._counts) < 2:
            return None
        (since, before), (until, after) = self._counts[0], self._counts[-1]
        return (after - before) / (until - since)


def best_device() -> str:
    """Return ``cuda`` if torch can use a GPU of this machine, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"
