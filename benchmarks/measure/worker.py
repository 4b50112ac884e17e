"""Worker process that leases, fetches and pushes without training.

Everything between the learner and the servers is the product's own code. The learner returns the
same synthetic update at once, so that all of the time goes into the exchange.

Run as ``python -m benchmarks.measure.worker --job JOB --worker NAME --tally FILE``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.measure.gauges import resident_bytes
from benchmarks.measure.tally import Tally
from vcasgd.errors import VcasgdError
from vcasgd.learning.vector import new_vector
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import JobRecord
from vcasgd.task.task import Task
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.loop import Worker
from vcasgd.worker.main import keep_freed_memory

#: Small enough that the weights stay finite after millions of updates.
UPDATE_SCALE = 1e-6


class Numbers(Dataset[int]):
    """Placeholder data set with one sample per push."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index


class Synthetic(Task):
    """Task with a model of ``floats`` numbers that has no memory. One sample is one push."""

    batch_size = 1

    def __init__(self, floats: int, samples: int) -> None:
        self._floats = floats
        self._samples = samples

    def model(self) -> nn.Module:
        module = nn.Module()
        module.weights = nn.Parameter(torch.empty(self._floats, device="meta"))
        return module

    def dataset(self, split: str) -> Dataset[int]:
        return Numbers(self._samples if split == "train" else 1)


class SyntheticLearner(Learner):
    """Learner that returns at once; it calls ``on_push`` before each push, with a current base."""

    def __init__(self, spec: JobSpec, on_push: Callable[[], None], *, fresh: bool) -> None:
        super().__init__(spec, Synthetic(**spec.args), "meta")
        self._on_push = on_push
        #: The update that is sent again and again; None if each one is written into memory.
        self._synthetic: Tensor | None = None
        if not fresh:
            self._synthetic = torch.randn(self.layout.floats).mul_(UPDATE_SCALE)

    def initial(self) -> tuple[Tensor, Tensor]:
        return new_vector(self.layout.floats), torch.zeros(0, dtype=torch.int64)

    def rehearse(self, on_progress: Callable[[], None]) -> None:
        """Do nothing, because the model has no values."""

    def start_subtask(self) -> None:
        """Do nothing; there is no optimizer."""

    def train(
        self,
        base: Base,
        subtask: int,  # noqa: ARG002 - all subtasks are equal
        start: int,  # noqa: ARG002
        stop: int,
        *,
        after_step: Callable[[], bool] = lambda: False,
        asynchrony: float = 0.0,  # noqa: ARG002
        memory: Callable[[], Tensor] | None = None,
        reads: bool = True,  # noqa: ARG002 - no worker keeps a copy
    ) -> Trained:
        self._on_push()
        after_step()
        update = self._synthetic
        if update is None:
            assert memory is not None
            update = memory().fill_(UPDATE_SCALE)
        return Trained(stop, 1, 0.0, update, base.integers)


class SyntheticWorker(Worker):
    """The product's worker with a learner that needs no package."""

    def __init__(
        self, settings: Settings, job: str, name: str, tally: Tally, *, fresh: bool
    ) -> None:
        super().__init__(settings, job, name, build=self._build)
        self._tally, self._fresh = tally, fresh
        #: Version of each shard in the last base.
        self._versions: dict[int, tuple[int, int] | None] = {}

    def _build(self, job: JobRecord) -> Learner:
        learner = SyntheticLearner(
            job.spec, lambda: self._count(learner.layout.floats), fresh=self._fresh
        )
        return learner

    def _count(self, floats: int) -> None:
        """Count what each shard fetched and applied since the last push."""
        for link in self.exchange:
            if link.version != self._versions.get(link.part.shard):
                self._versions[link.part.shard] = link.version
                self._tally.note_fetched(link.part.floats / floats)
            while link.updates.delays:
                self._tally.note_applied(link.updates.delays.popleft())


def main() -> int:
    """Run the worker process. Exits with status 0 after an orderly shutdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--tally", type=Path, required=True)
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    configure_logging("worker")
    # All processes of a measurement share the processors of one machine.
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        tally = Tally(options.tally, create=True)
        worker = SyntheticWorker(
            load_settings(), options.job, options.worker, tally, fresh=options.fresh
        )
        tally.note_baseline(resident_bytes(os.getpid()))
        signal.signal(signal.SIGTERM, lambda _number, _frame: worker.leave("SIGTERM"))
        worker.run()
    except VcasgdError as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
