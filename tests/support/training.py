"""A job that counts, and a record of every step that any worker made for it.

After training, every coordinate of the model says how often its sample was applied, and the
trace says how often it was trained: the first must always be exact, and the second shows how
much work a fault cost.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from support.harness import Loop, Plain
from support.waiting import PATIENCE, await_truth
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.worker.pending_updates import MAX_UNAPPLIED

TASKS = Path(__file__).parent / "tasks"
#: of the task: samples in a local step
BATCH = 5


class Training:
    """``samples`` an epoch in ``subtasks`` pieces; a push after every ``push_every`` steps, of
    which each takes ``step_seconds`` until :meth:`let_go`."""

    def __init__(
        self,
        plain: Plain,
        *,
        samples: int = 400,
        epochs: int = 2,
        subtasks: int = 4,
        push_every: int | str = 4,
        step_seconds: float = 0.05,
        task: str = "traced:Traced",
        **fields: Any,
    ) -> None:
        self.plain = plain
        self.plan = EpochPlan(samples, subtasks, epochs, seed=0)
        self.total = samples * epochs
        self.interval = samples if push_every == "subtask" else int(push_every) * BATCH
        self._trace, self._hold = plain.home / "trace", plain.home / "hold"
        self._hold.touch()
        self.job = plain.submit_audit(
            samples=samples,
            epochs=epochs,
            subtasks=subtasks,
            push_every=push_every,
            step_seconds=step_seconds,
            working_dir=TASKS,
            task=task,
            args={"trace": str(self._trace), "hold": str(self._hold)},
            **fields,
        )

    def start(self, workers: int) -> list[str]:
        """Servers and workers; returns when the training has begun."""
        self.plain.start_servers()
        names = self.add_workers(workers)
        self.plain.play_controller(self.job)
        return names

    def let_go(self) -> None:
        """From here on it is trained as fast as possible, and comes to its end."""
        self._hold.unlink(missing_ok=True)

    def add_workers(self, number: int) -> list[str]:
        return self.plain.start_workers(self.job, number)

    def worker(self, name: str) -> Loop:
        return self.plain.workers[name]

    # -- waiting ------------------------------------------------------------------------------

    def reach(self, samples: int, timeout: float = PATIENCE, shard: int = 0) -> None:
        """Until so many samples are applied in a shard."""
        await_truth(lambda: self.plain.applied(self.job, shard) >= samples, timeout, interval=0.005)

    def go_on(self, samples: int = 1, shard: int = 0) -> None:
        """Until so many more are applied than now."""
        self.reach(self.plain.applied(self.job, shard) + samples, shard=shard)

    def await_steps(self, name: str, steps: int) -> None:
        """Until a worker has begun so many local steps."""
        await_truth(lambda: len(self.steps_of(name)) >= steps, interval=0.005)

    def is_in_the_middle(self, name: str) -> bool:
        """Whether a worker is in the third step of a push interval that is not its first."""
        per_interval, steps = self.interval // BATCH, len(self.steps_of(name))
        return steps > per_interval and steps % per_interval == 3

    def await_middle_of_interval(self, name: str) -> None:
        """It may be over when this returns; see :meth:`freeze_in_the_middle`."""
        await_truth(lambda: self.is_in_the_middle(name), interval=0.002)

    def freeze_in_the_middle(self, name: str) -> None:
        """Stops a worker in the middle of a push interval."""
        worker = self.worker(name)

        def is_stopped_there() -> bool:
            self.await_middle_of_interval(name)
            worker.freeze()
            stopped_there = self.is_in_the_middle(name)
            if not stopped_there:
                worker.thaw()
            return stopped_there

        await_truth(is_stopped_there)

    def finish(self) -> None:
        """Until every epoch is applied; fails unless each sample of each is, exactly once."""
        self.let_go()
        epochs = self.plan.epochs
        await_truth(lambda: self.plain.jobs.get(self.job).finished_epochs == epochs, interval=0.05)
        self._assert_exact(self.plain.vector(self.job))

    def succeed(self) -> JobRecord:
        """As :meth:`finish`, until the keeper has stored the model."""
        self.let_go()

        def ended() -> bool:
            state = self.plain.jobs.get(self.job).state
            assert state is not JobState.FAILED
            return state is JobState.SUCCEEDED

        await_truth(ended, interval=0.05)
        job = self.plain.jobs.get(self.job)
        assert job.model is not None
        self._assert_exact(self.plain.checkpoints(self.job).read(job.model).floats)
        return job

    def _assert_exact(self, vector: torch.Tensor) -> None:
        totals = self.plain.jobs.get(self.job).totals
        assert totals["samples"] == totals["applied"] == self.total
        assert totals["repeated"] == 0
        assert len(vector) == len(self.plain.nodes) * self.plan.samples
        wrong = {
            sample: count
            for sample, count in enumerate(vector.tolist())
            if count != self.plan.epochs
        }
        assert not wrong, f"applied {self.plan.epochs} times expected: {wrong}"

    # -- what was trained -----------------------------------------------------------------------

    def steps(self) -> list[tuple[int, list[int]]]:
        """Every local step that was begun: process and samples."""
        lines = self._trace.read_text().splitlines() if self._trace.exists() else []
        numbers = [[int(word) for word in line.split()] for line in lines]
        return [(pid, samples) for pid, *samples in numbers]

    def steps_of(self, name: str) -> list[list[int]]:
        pid = self.worker(name).pid
        return [samples for trained_by, samples in self.steps() if trained_by == pid]

    def trained_again(self) -> int:
        """Samples that were trained more often than they were applied. Only after the end."""
        trained = Counter(sample for _, samples in self.steps() for sample in samples)
        assert len(trained) == self.plan.samples
        return trained.total() - self.total

    def most_again(self, killed: int = 1) -> int:
        """So many samples may be trained again after some workers were killed, each in the middle
        of a push interval. On a machine that is too busy a lease may also expire whose worker
        lives: that costs what it had pushed, too."""
        expired = self.plain.jobs.work(self.job).get("expired", 0)
        assert expired >= killed
        return self.interval * (killed + (1 + MAX_UNAPPLIED) * (expired - killed))

    def beat(self, name: str) -> Heartbeat:
        """Return a worker's last heartbeat, or an empty one."""
        return self.plain.jobs.workers(self.job).get(name, Heartbeat())
