"""A job that counts, and a trace of every local step of its workers.

After training, each coordinate of the model is the number of times that its sample was applied,
which must always be exact. The trace has the number of times that the sample was trained, which
shows how much work a fault cost.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.children import Child
from support.exact import counts_after
from support.harness import Harness
from support.waiting import PATIENCE, await_truth
from vcasgd.learning.length import default_subtasks
from vcasgd.learning.subtasks import EpochPlan, SampleOrder
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.worker.update_queue import MAX_UNAPPLIED

TASKS = Path(__file__).parent / "tasks"
#: Samples in a local step of the task.
BATCH = 5


class Training:
    """A job with ``samples`` per epoch in ``subtasks``, and a push after ``push_every`` steps.

    The job has ``epochs``, or ends after ``max_samples``. ``subtasks`` is None for the default.
    With ``push_every`` None, the workers choose it. ``order`` is that of the task's sampler. Each
    step takes ``step_seconds`` until :meth:`release`, and more in the second half of the job.
    """

    def __init__(
        self,
        harness: Harness,
        *,
        samples: int = 400,
        epochs: int = 2,
        max_samples: int | None = None,
        subtasks: int | None = 4,
        push_every: int | str | None = 4,
        step_seconds: float = 0.05,
        task: str = "traced:Traced",
        order: SampleOrder | None = None,
        **fields: Any,
    ) -> None:
        self.harness = harness
        per_epoch = subtasks or default_subtasks(samples, BATCH)
        total = samples * epochs if max_samples is None else max_samples
        epochs = -(-total // samples)
        self.plan = EpochPlan(
            *(samples, per_epoch, epochs, 0, None, order), total_samples=total, batch_size=BATCH
        )
        self.total = total
        self.interval = samples if push_every == "subtask" else int(push_every or 1) * BATCH
        name = secrets.token_hex(4)
        self._trace, self._hold = (harness.home / f"{kind}-{name}" for kind in ("trace", "hold"))
        self._hold.write_text(str(total))
        self.job = harness.submit_audit(
            samples=samples,
            **({"epochs": epochs} if max_samples is None else {"max_samples": max_samples}),
            subtasks=subtasks,
            push_every=push_every,
            step_seconds=step_seconds,
            working_dir=TASKS,
            task=task,
            args={"trace": str(self._trace), "hold": str(self._hold)},
            **fields,
        )

    def start(self, workers: int) -> list[str]:
        """Start servers and workers; return when training has started."""
        self.harness.start_servers()
        names = self.add_workers(workers)
        self.harness.start_job_when_ready(self.job)
        return names

    def start_with_job_loop(self, workers: int = 2) -> list[str]:
        """Start the server, the job loop, and workers; return when training has started."""
        self.harness.start_server()
        self.harness.start_job_loop()
        names = self.add_workers(workers)
        self.await_samples(1)
        return names

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    def add_workers(self, number: int) -> list[str]:
        return self.harness.start_workers(self.job, number)

    def worker(self, name: str) -> Child:
        return self.harness.workers[name]

    # -- waiting ------------------------------------------------------------------------------

    def await_samples(self, samples: int, timeout: float = PATIENCE, shard: int = 0) -> None:
        """Wait until so many samples are applied in a shard."""
        await_truth(
            lambda: self.harness.applied(self.job, shard) >= samples, timeout, interval=0.005
        )

    def await_more_samples(self, samples: int = 1, shard: int = 0) -> None:
        """Wait until so many more samples are applied in a shard."""
        self.await_samples(self.harness.applied(self.job, shard) + samples, shard=shard)

    def await_steps(self, name: str, steps: int) -> None:
        """Wait until a worker has started so many local steps."""
        await_truth(lambda: len(self.steps_of(name)) >= steps, interval=0.005)

    def is_mid_interval(self, name: str) -> bool:
        """Return True if a worker has done a step of a push interval after its first one, and
        hasn't started the last one.
        """
        per_interval, steps = self.interval // BATCH, len(self.steps_of(name))
        return steps > per_interval and steps % per_interval >= 2

    def await_mid_interval(self, name: str) -> None:
        """Wait for the middle of an interval, which can have ended when this returns; see
        :meth:`freeze_mid_interval`.
        """
        await_truth(lambda: self.is_mid_interval(name), interval=0.002)

    def await_any_mid_interval(self, names: Sequence[str]) -> str:
        """Do the same for whichever worker gets there first; the job may end before others start.

        Returns its name.
        """

        def found() -> str | None:
            return next((name for name in names if self.is_mid_interval(name)), None)

        return await_truth(found, interval=0.002)

    def freeze_mid_interval(self, name: str) -> None:
        """Suspend a worker in the middle of a push interval."""
        worker = self.worker(name)

        def is_frozen_mid_interval() -> bool:
            self.await_mid_interval(name)
            worker.freeze()
            frozen = self.is_mid_interval(name)
            if not frozen:
                worker.thaw()
            return frozen

        await_truth(is_frozen_mid_interval)

    def finish(self) -> None:
        """Wait until the whole job is applied; fail unless each sample is, as often as planned."""
        self.await_end()
        self._assert_exact(self.harness.vector(self.job))

    def await_end(self) -> None:
        """Wait until the whole job is applied, and each sample is counted once."""
        self.release()
        epochs = self.plan.epochs
        await_truth(
            lambda: self.harness.jobs.get(self.job).finished_epochs == epochs, interval=0.05
        )
        totals = self.harness.jobs.get(self.job).totals
        assert totals["samples"] == totals["applied"] == self.total
        assert totals["repeated"] == 0

    def await_success(self) -> JobRecord:
        """Do what :meth:`finish` does, and wait until the job loop has stored the model."""
        self.release()

        def ended() -> bool:
            state = self.harness.jobs.get(self.job).state
            assert state is not JobState.FAILED
            return state is JobState.SUCCEEDED

        await_truth(ended, interval=0.05)
        job = self.harness.jobs.get(self.job)
        self._assert_exact(self.harness.checkpoints(self.job).read(job.model).floats)
        return job

    def _assert_exact(self, vector: torch.Tensor) -> None:
        totals = self.harness.jobs.get(self.job).totals
        assert totals["samples"] == totals["applied"] == self.total
        assert totals["repeated"] == 0
        assert len(vector) == len(self.harness.nodes) * self.plan.samples
        expected = counts_after(self.plan, self.plan.epochs) * len(self.harness.nodes)
        pairs = enumerate(zip(vector.tolist(), expected, strict=True))
        wrong = {sample: pair for sample, pair in pairs if pair[0] != pair[1]}
        assert not wrong, f"applied and expected times differ: {wrong}"

    # -- the trace ------------------------------------------------------------------------------

    def steps(self) -> list[tuple[int, list[int]]]:
        """Return the process and the samples of every started local step."""
        lines = self._trace.read_text().splitlines() if self._trace.exists() else []
        numbers = [[int(word) for word in line.split()] for line in lines]
        return [(pid, samples) for pid, *samples in numbers]

    def steps_of(self, name: str) -> list[list[int]]:
        pid = self.worker(name).pid
        return [samples for trained_by, samples in self.steps() if trained_by == pid]

    def repeated_samples(self) -> int:
        """Return how many samples were trained but not applied. Call this only after the end."""
        trained = Counter(sample for _, samples in self.steps() for sample in samples)
        assert self.plan.order is not None or len(trained) == self.plan.samples
        return trained.total() - self.total

    def unexplained_repeats(self) -> int:
        """Return how many samples were trained again although no lease expired or was overtaken.

        On a busy machine, both happen to living workers.
        """
        return max(0, self.repeated_samples() - self._cost_of_lost_leases(killed=0))

    def most_repeated_samples(self, killed: int = 1) -> int:
        """Return the most samples that can be trained again after workers were killed.

        Each was killed in the middle of a push interval. On a busy machine, the lease of a living
        worker can expire, too; that also costs its unapplied updates.
        """
        return self._cost_of_lost_leases(killed)

    def _cost_of_lost_leases(self, killed: int) -> int:
        work = self.harness.jobs.work(self.job)
        lost = work.get("expired", 0) + work.get("overtaken", 0)
        assert lost >= killed
        return self.interval * (killed + (1 + MAX_UNAPPLIED) * (lost - killed))

    def heartbeat(self, name: str) -> Heartbeat:
        """Return a worker's last heartbeat, or an empty one."""
        return self.harness.jobs.workers.heartbeats(self.job).get(name, Heartbeat())


def running(harness: Harness, *, applied: int = 100, **fields: Any) -> Training:
    """Return a job that two workers train, once so many samples are applied in each shard."""
    training = Training(harness, **fields)
    training.start(2)
    for shard in range(len(harness.nodes)):
        training.await_samples(applied, shard=shard)
    return training
