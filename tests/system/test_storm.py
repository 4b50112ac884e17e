"""Processes are killed at random, and the job still counts each sample once."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Harness
from support.training import Training

from vcasgd.store.ledger.job import JobState

Eventually = Callable[..., Any]


class Storm:
    """Kills the processes that a seeded random generator picks, and restarts them."""

    STRIKES = 12

    def __init__(self, training: Training, seed: int, workers: int) -> None:
        self.training = training
        self.harness = training.harness
        self.random = random.Random(seed)
        self.keeper = self.harness.start_job_loop()
        self.alive = training.add_workers(workers)
        self.triggers = 0
        self.hit: set[str] = set()
        self._again = {
            "worker": self._add_worker,
            "server": self.harness.start_server,
            "tensors": self.harness.tensors.start,
            "ledger": self.harness.ledger.start,
            "job-loop": self._start_job_loop,
        }

    @property
    def is_over(self) -> bool:
        """True after enough triggers that have hit each target at least once."""
        return self.triggers >= self.STRIKES and self.hit == set(self._again)

    def strike(self) -> None:
        """Kill one to four targets at once, then restart them in another order."""
        targets = self.random.choices(list(self._again), k=self.random.randint(1, 4))
        # Several workers can die at once; of each other target there is only one.
        targets = [each for n, each in enumerate(targets) if self._is_possible(each, targets[:n])]
        for target in targets:
            self._kill(target)
        self.triggers += 1
        self.hit |= set(targets)
        self.random.shuffle(targets)
        for target in targets:
            self._again[target]()

    def _is_possible(self, target: str, chosen: list[str]) -> bool:
        return chosen.count(target) < (len(self.alive) if target == "worker" else 1)

    def _kill(self, target: str) -> None:
        match target:
            case "worker":
                victim = self.alive.pop(self.random.randrange(len(self.alive)))
                self.training.worker(victim).kill()
            case "server":
                self.harness.server.kill()
            case "tensors":
                self.harness.tensors.kill()
            case "ledger":
                self.harness.ledger.kill()
            case "job-loop":
                self.keeper.kill()

    def _add_worker(self) -> None:
        self.alive += self.training.add_workers(1)

    def _start_job_loop(self) -> None:
        self.keeper = self.harness.start_job_loop()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
def test_random_kills_lose_and_repeat_nothing(harness: Harness, eventually: Eventually) -> None:
    # Given three workers, and regular checkpoints
    seed = int(os.environ.get("VCASGD_STORM_SEED", random.randrange(10_000)))
    sys.stdout.write(f"VCASGD_STORM_SEED={seed}\n")
    training = Training(
        harness,
        samples=2000,
        epochs=3,
        subtasks=20,
        checkpoint={"every": "1s"},
    )
    harness.start_server()
    storm = Storm(training, seed, workers=3)
    eventually(lambda: harness.jobs.get(training.job).state is JobState.RUNNING)

    # When processes are killed whenever training has advanced
    while not storm.is_over:
        training.await_more_samples(storm.random.randrange(20, 300))
        assert harness.jobs.get(training.job).state is JobState.RUNNING, "the job was too short"
        storm.strike()

    # Then the job succeeds, and its model counts each sample of each epoch exactly once
    training.await_success()
