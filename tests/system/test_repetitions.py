"""A machine of one's own repeats volunteers' intervals, and finds what looks like honest noise."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import pytest
from support.harness import PATIENCE, Harness
from support.hostile_worker import ATTACK, BEGUN
from support.training import TASKS
from support.waiting import await_truth

from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.placement import Owners
from vcasgd.verification.exchange import (
    WRONG_STATE,
    RepetitionExchange,
    RepetitionTask,
)

SAMPLES, EPOCHS = 800, 12
#: Seconds of a local step: on any computer, a machine repeats about one interval per second.
PAUSE = 0.1
OWN = "own"
#: Settings that keep PyTorch and its libraries from using recent vector instructions.
OLD_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}


class RepeatedJob:
    """A job of one machine of one's own, and of volunteers, of which mallory may attack."""

    def __init__(
        self,
        harness: Harness,
        attack: str | None = None,
        *,
        epochs: int = EPOCHS,
        own: int = 1,
        volunteers_env: Mapping[str, str] | None = None,
    ) -> None:
        self.harness, self.attack, self.epochs = harness, attack, epochs
        self.begun, self._hold = harness.home / "attack", harness.home / "hold"
        self._hold.touch()
        harness.bind_workers("only the platform knows")
        self.job = harness.submit(
            TASKS,
            task="blobs:Blobs",
            args={"samples": SAMPLES, "pause": PAUSE, "hold": str(self._hold)},
            epochs=epochs,
            subtasks_per_epoch=10,
            push_every=None,
            update={"rule": "rounds"},
            checkpoint={"every": "1s", "keep": 50},
        )
        harness.start_server(entry="support.eager_server:run")
        harness.start_job_loop()
        self.own = [harness.start_worker(self.job, name=f"{OWN}-{n}") for n in range(own)]
        for owner in ("alice", "mallory"):
            self._start(owner, volunteers_env)

    def _start(self, owner: str, fresh_env: Mapping[str, str] | None) -> None:
        name = f"{self.job}.join-{owner}-1"
        # As the controller does before it starts a worker.
        Owners(self.harness.ledger.connection).place({self.job: {name: owner}})
        env, entry = {"VCASGD_VOLUNTEER": "true"}, "vcasgd.worker.main:main"
        if owner == "mallory" and self.attack:
            entry = "support.hostile_worker:run"
            env |= {ATTACK: self.attack, BEGUN: str(self.begun)}
        self.harness.start_worker(self.job, name=name, entry=entry, env=env, fresh_env=fresh_env)

    def await_samples(self, samples: int) -> None:
        await_truth(lambda: self.harness.applied(self.job) >= samples, timeout=4 * PATIENCE)

    def attack_at(self, samples: int) -> None:
        self.await_samples(samples)
        self.begun.touch()

    def release(self) -> None:
        """Train as fast as possible until the end."""
        self._hold.unlink()

    def refused_states(self) -> int:
        """Return how many updates didn't continue from the state before them."""
        totals = self.harness.snapshots(self.job).read().meta.totals
        return totals.rejected.get(WRONG_STATE, 0)

    def uploads(self, owner: str) -> int:
        """Return how often the owner's machine has uploaded its states."""
        return self.log(f"{self.job}.join-{owner}-1").count("uploading the states")

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

    def task(self) -> RepetitionTask | None:
        """Return the repetition that a worker was asked for last, if it is still open."""
        return RepetitionExchange(self.harness.tensors.connection, TensorKeys(self.job)).task()

    def hold_helper(self) -> RepetitionTask:
        """Freeze a worker that has to repeat an interval, before it does; return its task."""
        held: list[RepetitionTask] = []

        def holds() -> bool:
            task = self.task()
            if task is None:
                return False
            helper = self.harness.workers[task.by]
            helper.freeze()
            if self.task() == task and not self.was_repeated(task):
                held.append(task)
            else:
                helper.thaw()
            return bool(held)

        await_truth(holds, interval=0.002)
        return held[0]

    def was_repeated(self, task: RepetitionTask, by: str | None = None) -> bool:
        return f"repeated update {task.update.update}:" in self.log(by or task.by)

    def log(self, worker: str) -> str:
        return (self.harness.home / f"{worker}.log").read_text()

    def differences(self) -> list[float]:
        """Return all relative differences that machines of one's own have found."""
        found = "".join(map(self.log, self.own))
        return [float(each) for each in re.findall(r"(?:update|state)=([0-9.e-]+)", found)]

    def failed(self) -> list[str]:
        return [each["text"] for each in self.harness.events(self.job, "repetition-failed")]


def _is_found(harness: Harness, attack: str, text: str, epochs: int = EPOCHS) -> RepeatedJob:
    # Given a job that has a machine of one's own
    job = RepeatedJob(harness, attack, epochs=epochs)
    job.attack_at(SAMPLES)

    # When one of its volunteers attacks from then on
    await_truth(lambda: harness.events(job.job, "rolled-back"), timeout=4 * PATIENCE)
    job.release()
    done = job.await_success()

    # Then it is named, by two repetitions
    assert job.accused() == ["mallory"]
    failed = job.failed()
    assert len(failed) == 2
    assert all(text in each for each in failed), failed

    # and what it has done is undone
    (event,) = harness.events(job.job, "rolled-back")
    assert event["details"]["owner"] == "mallory"
    assert done.tuned.learning_rate == 1.0
    return job


@pytest.mark.extended
def test_a_push_of_a_third_of_each_update_is_found(harness: Harness) -> None:
    _is_found(harness, "backdoor", "it differs by", epochs=6)


@pytest.mark.extended
def test_a_push_of_the_momentum_is_found_by_the_state_after_an_interval(harness: Harness) -> None:
    _is_found(harness, "momentum", "the state after it differs by")


@pytest.mark.extended
def test_a_malformed_upload_is_refused_and_harms_nobody(harness: Harness) -> None:
    job = _is_found(harness, "garbage", "the state before the interval")
    assert harness.jobs.failures(job.job) == []


@pytest.mark.extended
def test_honest_machines_with_other_rounding_are_not_accused(harness: Harness) -> None:
    # Given a volunteer whose processor lacks the vector instructions of one's own machine
    job = RepeatedJob(harness, volunteers_env=OLD_PROCESSOR)

    # When their updates are repeated
    job.await_success()

    # Then all of them are right
    differences = job.differences()
    assert len(differences) > 20
    assert 0 < max(differences) < 0.01
    assert job.accused() == job.failed() == []


@pytest.mark.slow
@pytest.mark.ci
def test_another_machine_repeats_an_interval_when_one_is_lost(harness: Harness) -> None:
    # Given two machines of one's own, of which one was asked to repeat an interval and is lost
    job = RepeatedJob(harness, epochs=4, own=2)
    held = job.hold_helper()

    # When it doesn't come back
    harness.workers[held.by].kill()

    # Then the other one repeats it, and the job goes on
    other = next(each for each in job.own if each != held.by)
    await_truth(lambda: job.was_repeated(held, by=other))
    job.await_success()
    assert job.accused() == job.failed() == []


@pytest.mark.extended
@pytest.mark.parametrize("harness", [0.25], indirect=True)
def test_a_machine_that_loses_its_leases_starts_with_a_new_optimizer_and_is_not_accused(
    harness: Harness,
) -> None:
    # Given a volunteer whose updates of a lost lease never reach the model
    job = RepeatedJob(harness, epochs=40)
    frozen = harness.workers[f"{job.job}.join-alice-1"]
    job.await_samples(SAMPLES)

    # When that happens until its next update doesn't continue from the last one in the model
    for _ in range(30):
        frozen.freeze()
        time.sleep(harness.settings.lease_seconds + 1)
        frozen.thaw()
        if job.refused_states():
            break
        time.sleep(1)
    assert job.refused_states()

    # Then it goes on, and no owner is accused
    contributed = job.uploads("alice")
    await_truth(lambda: job.uploads("alice") > contributed, timeout=2 * PATIENCE)
    assert harness.jobs.workers.quarantined(job.job) == {}
    assert job.accused() == job.failed() == []
