"""A machine of one's own repeats volunteers' intervals, and finds what looks like honest noise."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import pytest
from support.harness import PATIENCE, Harness
from support.owned_job import EPOCHS, HOSTILE, SAMPLES, OwnedJob
from support.waiting import await_truth

from vcasgd.store.keys import TensorKeys
from vcasgd.verification.exchange import (
    WRONG_STATE,
    RepetitionExchange,
    RepetitionTask,
)

#: Seconds of a local step: on any computer, a machine repeats about one interval per second.
PAUSE = 0.1
#: Settings that keep PyTorch and its libraries from using recent vector instructions.
OLD_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}


class RepeatedJob(OwnedJob):
    """A job of machines of one's own, and of two volunteers."""

    def __init__(
        self,
        harness: Harness,
        attack: str | None = None,
        *,
        epochs: int = EPOCHS,
        own: int = 1,
        volunteers_env: Mapping[str, str] | None = None,
    ) -> None:
        self._hold = harness.home / "hold"
        self._hold.touch()
        args = {"pause": PAUSE, "hold": str(self._hold)}
        super().__init__(harness, attack, epochs, args, push_every=None)
        harness.start_server(entry="support.eager_server:run")
        harness.start_job_loop()
        self.own = [harness.start_worker(self.job, name=f"own-{n}") for n in range(own)]
        for owner in ("alice", HOSTILE):
            env = {"VCASGD_VOLUNTEER": "true"}
            self.start_worker_of(owner, env=env, fresh_env=volunteers_env)

    def release(self) -> None:
        self._hold.unlink()

    def refused_states(self) -> int:
        totals = self.harness.snapshots(self.job).read().meta.totals
        return totals.rejected.get(WRONG_STATE, 0)

    def uploads(self, owner: str) -> int:
        return self.log(self.worker_of(owner)).count("uploading the states")

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

    # Then it is named, by two repetitions, and what it has done is undone
    job.assert_undone(done)
    failed = job.failed()
    assert len(failed) == 2
    assert all(text in each for each in failed), failed
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

    job.await_success()

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
    frozen = harness.workers[job.worker_of("alice")]
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

    contributed = job.uploads("alice")
    await_truth(lambda: job.uploads("alice") > contributed, timeout=2 * PATIENCE)
    assert harness.jobs.workers.quarantined(job.job) == {}
    assert job.accused() == job.failed() == []
