"""Rounds on real servers and processes: kills cost at most a moment, and no sample."""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.noting_worker import NOTES, intervals
from support.training import TASKS, Training
from support.waiting import await_truth

ROUNDS = {"rule": "rounds"}


def start(harness: Harness, workers: int, push_every: int | None = 4) -> tuple[Training, list[str]]:
    training = Training(harness, samples=600, push_every=push_every, update=ROUNDS)
    return training, training.start(workers)


def members(harness: Harness, job: str) -> int:
    return harness.snapshots(job).read().meta.round.workers


def one_round_late(harness: Harness, job: str) -> int:
    """Return the number of updates whose base lacked the round of two workers before them."""
    return harness.snapshots(job).read().meta.totals.staleness.get("2", 0)


def test_workers_train_from_the_same_version(harness: Harness) -> None:
    training, _ = start(harness, 3)

    def share_the_batch() -> bool:
        facts = harness.snapshots(training.job).read().meta.round
        return bool(facts.workers == 3 and facts.batch == pytest.approx(5, abs=1.5))

    await_truth(share_the_batch)

    training.await_end()
    totals = harness.snapshots(training.job).read().meta.totals
    assert totals.staleness_mean < 1


@pytest.mark.ci
def test_exchanges_are_measured_if_a_subtask_is_one_interval(harness: Harness) -> None:
    training = Training(
        harness, samples=300, subtasks=30, push_every=8, step_seconds=0.01, update=ROUNDS
    )
    training.start(2)

    await_truth(lambda: harness.snapshots(training.job).read().meta.round.exchange_seconds > 0)

    training.await_end()


@pytest.mark.ci
@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["fast heartbeat"])
def test_a_round_does_not_wait_until_a_slow_worker_ends_its_interval(harness: Harness) -> None:
    # Given two workers; a step of one takes sixteen times as long
    marker, notes = harness.home / "slow", harness.home / "notes"
    notes.mkdir()
    job = harness.submit_audit(
        working_dir=TASKS,
        task="uneven:Uneven",
        args={"slow": str(marker), "slow_seconds": 0.75},
        samples=4000,
        epochs=40,
        subtasks=4,
        push_every=16,
        step_seconds=0.05,
        update=ROUNDS,
    )
    harness.start_server()
    harness.start_job_loop()
    for _ in range(2):
        harness.start_worker(job, entry="support.noting_worker:run", env={NOTES: str(notes)})

    def slow() -> list[int]:
        pid = int(marker.read_text() or 0) if marker.exists() else 0
        return intervals(notes, pid)

    # When the others know how fast it is
    await_truth(slow)
    assert slow()[0] > 8

    # Then it pushes what it has when the other one has ended its interval, which takes that long
    # again if it has to wait for a processor
    await_truth(lambda: [steps for steps in slow()[1:] if 1 <= steps <= 3])
    assert harness.jobs.get(job).totals["repeated"] == 0


@pytest.mark.parametrize(
    ("push_every", "killed"),
    [
        pytest.param(4, "parameter-server", id="waiting, parameter server"),
        pytest.param(None, "worker", id="overlapping, worker"),
        pytest.param(4, "worker", id="waiting, worker", marks=pytest.mark.extended),
        pytest.param(
            *(None, "parameter-server"),
            id="overlapping, parameter server",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_kill_loses_nothing(harness: Harness, killed: str, push_every: int | None) -> None:
    training, names = start(harness, 2, push_every)
    await_truth(lambda: members(harness, training.job) == 2)
    if push_every is None:
        await_truth(lambda: one_round_late(harness, training.job) > 3)

    if killed == "worker":
        training.worker(names[0]).kill()
        await_truth(lambda: members(harness, training.job) == 1)
    else:
        harness.servers[0].kill()
        harness.start_server()
        training.await_more_samples()

    training.await_end()
    assert harness.snapshots(training.job).read().meta.totals.rejected == {}
