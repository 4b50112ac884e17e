"""A job that machines of several owners train, one of which may turn hostile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.harness import Harness
from support.hostile_worker import ATTACK, BEGUN
from support.training import TASKS
from support.waiting import PATIENCE, await_truth
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.placement import Owners

SAMPLES, EPOCHS = 800, 12
HOSTILE = "mallory"


class OwnedJob:
    """A job whose workers have keys of their own.

    The worker of mallory does ``attack`` from :meth:`attack_at` on.
    """

    def __init__(
        self,
        harness: Harness,
        attack: str | None,
        epochs: int,
        args: Mapping[str, Any],
        push_every: int | None,
    ) -> None:
        self.harness, self.attack, self.epochs = harness, attack, epochs
        self.begun = harness.home / "attack"
        harness.bind_workers("only the platform knows")
        self.job = harness.submit(
            TASKS,
            task="blobs:Blobs",
            args={"samples": SAMPLES, **args},
            epochs=epochs,
            subtasks_per_epoch=10,
            push_every=push_every,
            update={"rule": "rounds"},
            checkpoint={"every": "1s", "keep": 50},
        )

    def worker_of(self, owner: str) -> str:
        return f"{self.job}.join-{owner}-1"

    def start_worker_of(self, owner: str, **options: Any) -> None:
        name = self.worker_of(owner)
        # As the controller does before it starts a worker.
        Owners(self.harness.ledger.connection).place({self.job: {name: owner}})
        if owner == HOSTILE and self.attack:
            options["entry"] = "support.hostile_worker:run"
            attack = {ATTACK: self.attack, BEGUN: str(self.begun)}
            options["env"] = {**options.get("env", {}), **attack}
        self.harness.start_worker(self.job, name=name, **options)

    def await_samples(self, samples: int) -> None:
        await_truth(lambda: self.harness.applied(self.job) >= samples, timeout=4 * PATIENCE)

    def attack_at(self, samples: int) -> None:
        self.await_samples(samples)
        self.begun.touch()

    def await_success(self) -> JobRecord:
        """Wait for the end; every sample of every epoch must be in the model once."""
        jobs = self.harness.jobs
        await_truth(lambda: jobs.get(self.job).state.over, timeout=8 * PATIENCE)
        done = jobs.get(self.job)
        assert done.state is JobState.SUCCEEDED, done.reason
        assert done.totals["samples"] == done.totals["applied"] == self.epochs * SAMPLES
        assert done.totals["repeated"] == 0
        return done

    def accused(self) -> list[str]:
        events = self.harness.events(self.job, "owner-quarantined")
        return [event["details"]["owner"] for event in events]

    def assert_undone(self, done: JobRecord) -> None:
        """Fail unless the hostile owner alone was accused, and its work undone."""
        assert self.accused() == [HOSTILE]
        (event,) = self.harness.events(self.job, "rolled-back")
        assert event["details"]["owner"] == HOSTILE
        assert done.tuned.learning_rate == 1.0
