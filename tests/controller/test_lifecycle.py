"""From a submission to a stored model: checkpoints, evaluations, and how a job ends."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.harness import Plain
from support.training import BATCH, Training

from vcasgd.store.ledger.job import JobRecord, JobState

Eventually = Callable[..., Any]


def start(training: Training, workers: int = 2) -> list[str]:
    """Server, keeper and workers; returns when the job runs."""
    training.plain.start_server()
    training.plain.start_keeper()
    names = training.add_workers(workers)
    training.reach(1)
    return names


def kinds(plain: Plain, job: str) -> list[str]:
    return [event["kind"] for event in plain.jobs.events(job)]


# --- to the end ---------------------------------------------------------------------------


def test_a_job_ends_with_the_model_that_was_evaluated_last(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a job whose epochs do not overlap
    training = Training(plain, epochs=3, max_epoch_lead=0)

    # When it has run to its end
    start(training)
    job = training.succeed()

    # Then every epoch was evaluated once, on the model as it was at its end
    assert [each.epoch for each in job.evaluations] == [1, 2, 3]
    assert [each.metrics["applied"] for each in job.evaluations] == [1.0, 2.0, 3.0]
    assert kinds(plain, job.id).count("evaluated") == 3

    # and the stored model is the last of them
    assert job.model is not None
    stored = plain.checkpoints(job.id).read(job.model).whole[0]
    assert stored.meta.version == job.evaluations[-1].version
    assert stored.record.finished == 3
    assert job.reason == "all 3 epochs are done"

    # and its history tells it in order, and nothing else
    told = [kind for kind in kinds(plain, job.id) if kind not in ("evaluated", "checkpoint")]
    assert told == ["submitted", "job-running", "job-finishing", "job-succeeded"]

    # and nothing of it stays in memory
    eventually(lambda: plain.tensors.connection.dbsize() == 0)


def test_a_job_stops_at_the_accuracy_that_was_asked_for(
    plain: Plain, tmp_path: Path, eventually: Eventually
) -> None:
    # Given a task whose accuracy is a tenth after every epoch, and another tenth, and so on
    job = submit(
        plain,
        tmp_path / "task",
        'return {"count": torch.tensor(len(batch)), "accuracy": model.count[batch].sum() / 10}',
        epochs=50,
        stop={"accuracy": 0.15},
    )

    # Then it ends soon after its second epoch, with a model that reached 0.15
    done = await_end(plain, job, eventually)
    assert done.final_epoch in range(2, 10)
    accuracy = f"{done.final_epoch / 10:.4f}"
    assert done.reason == f"accuracy {accuracy} reached 0.15 in epoch {done.final_epoch}"
    assert done.model is not None
    model = plain.checkpoints(job).read(done.model)
    assert model.floats.tolist() == [float(done.final_epoch)] * 100


def test_an_accuracy_that_was_reached_counts_although_the_next_epoch_was_worse(
    plain: Plain, tmp_path: Path, eventually: Eventually
) -> None:
    # Given a task that is right after its second epoch only, and nobody who looks at that time
    job = submit(
        plain,
        tmp_path / "task",
        'return {"count": torch.tensor(len(batch)), "accuracy": model.count[batch].eq(2).sum()}',
        keeper=False,
        epochs=4,
        stop={"accuracy": 0.9},
    )
    plain.play_controller(job)
    eventually(lambda: len(plain.jobs.get(job).evaluations) == 3)

    # When somebody looks
    plain.start_keeper()

    # Then the job ends with the model of the second epoch
    done = await_end(plain, job, eventually)
    assert done.final_epoch == 2
    assert done.model is not None
    assert plain.checkpoints(job).read(done.model).floats.tolist() == [2.0] * 100


def test_job_stops_at_the_target_of_any_metric(
    plain: Plain, tmp_path: Path, eventually: Eventually
) -> None:
    # Given a task whose loss falls by one after every epoch
    job = submit(
        plain,
        tmp_path / "task",
        """value = 9.0 * len(batch) - model.count[batch].sum()
                return {"count": torch.tensor(len(batch)), "cost": value}""",
        epochs=50,
        stop={"metric": {"name": "cost", "mode": "min", "target": 7.5}},
    )

    # Then it ends soon after its second epoch, with a model whose loss is below the target
    done = await_end(plain, job, eventually)
    assert done.final_epoch in range(2, 10)
    cost = f"{9 - done.final_epoch:.4f}"
    assert done.reason == f"cost {cost} reached 7.5 in epoch {done.final_epoch}"


def test_a_job_stops_when_its_time_is_over(
    plain: Plain, tmp_path: Path, eventually: Eventually
) -> None:
    # Given a job that would take an hour, and may take a second
    job = submit(plain, tmp_path / "task", "", epochs=5000, stop={"max_duration": 1})

    # Then it ends with the epoch that was evaluated last
    done = await_end(plain, job, eventually)
    assert done.final_epoch is not None
    assert done.reason == f"max_duration has passed; the last evaluated epoch is {done.final_epoch}"
    assert done.model is not None
    model = plain.checkpoints(job).read(done.model)
    assert model.floats.tolist() == [float(done.final_epoch)] * 100


def submit(
    plain: Plain, directory: Path, evaluate: str, *, keeper: bool = True, **fields: Any
) -> str:
    """The audit with another evaluation, 100 samples in 5 subtasks, and all that it needs."""
    code = f"""
        import pathlib, time, torch
        from vcasgd.chaos.task.audit import Audit

        class Mine(Audit):
            def evaluate(self, model, batch):
                {evaluate or "return super().evaluate(model, batch)"}
        """
    directory.mkdir()
    (directory / "train.py").write_text(textwrap.dedent(code))
    plain.start_server()
    if keeper:
        plain.start_keeper()
    job = plain.submit_audit(
        samples=100,
        subtasks=5,
        max_epoch_lead=0,
        working_dir=directory,
        task="train:Mine",
        **fields,
    )
    plain.start_worker(job)
    return job


def await_end(plain: Plain, job: str, eventually: Eventually) -> JobRecord:
    eventually(lambda: plain.jobs.get(job).state.over)
    done = plain.jobs.get(job)
    assert done.state is JobState.SUCCEEDED, done.reason
    return done


# --- what people want of it ------------------------------------------------------------------


def test_a_paused_job_keeps_all_its_work_and_goes_on_when_it_is_resumed(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a job at work, which pushes at the end of long subtasks only
    training = Training(plain, push_every="subtask")
    names = start(training)
    training.await_steps(names[0], 30)

    # When it is paused
    plain.jobs.pause(training.job)

    # Then the workers push what they have and leave, and the training stands still
    assert [training.worker(name).wait() for name in names] == [0, 0]
    trained = BATCH * len(training.steps())
    eventually(lambda: plain.applied(training.job) == trained)
    (late,) = training.add_workers(1)
    assert training.worker(late).wait() == 0
    assert plain.applied(training.job) == trained == BATCH * len(training.steps())

    # and when it is resumed, it goes on where it was
    plain.jobs.resume(training.job)
    training.add_workers(2)
    training.succeed()
    assert training.trained_again() == 0


def test_a_cancelled_job_lets_go_of_everything_at_once(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a job at work
    training = Training(plain, samples=4000)
    names = start(training)

    # When it is cancelled
    plain.jobs.cancel(training.job)

    # Then its workers leave and its tensors are gone, long before it would have ended
    assert [training.worker(name).wait() for name in names] == [0, 0]
    eventually(lambda: plain.tensors.connection.dbsize() == 0)
    assert BATCH * len(training.steps()) < training.total

    # and nobody brings it back
    beat = plain.server_beat()
    eventually(lambda: plain.server_beat() > beat)
    assert plain.tensors.connection.dbsize() == 0
    assert kinds(plain, training.job)[-1] == "job-cancelled"
    assert plain.server.alive


# --- checkpoints --------------------------------------------------------------------------------


def test_checkpoints_come_as_often_and_are_as_many_as_was_asked_for(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a job with a checkpoint every half second, of which two are kept
    training = Training(
        plain, samples=4000, epochs=1, checkpoint={"every": 0.5, "keep": 2}, step_seconds=0.02
    )
    start(training)

    # When there have been five
    written = eventually(lambda: at_least(5, plain.events(training.job, "checkpoint")))

    # Then they did not come more often
    assert all(later["at"] - former["at"] > 0.45 for former, later in pairwise(written))

    # and only the last two are left, each of them whole, and complete in itself
    plain.jobs.pause(training.job)
    checkpoints = plain.checkpoints(training.job)
    eventually(lambda: [each.name for each in checkpoints.all()] == names_of(plain, training)[-2:])
    for name in names_of(plain, training)[-2:]:
        loaded = checkpoints.read(name)
        assert loaded.floats.sum() == sum(loaded.whole[0].record.positions.values()) > 0
    assert list(plain.jobs.checkpoints(training.job)) == names_of(plain, training)[-2:]


def names_of(plain: Plain, training: Training) -> list[str]:
    """Of the checkpoints that were ever written, oldest first."""
    written = plain.events(training.job, "checkpoint")
    return [event["details"]["name"] for event in written]


def at_least(number: int, found: list[Any]) -> list[Any]:
    return found if len(found) >= number else []


def test_the_best_model_is_kept_beside_the_last(
    plain: Plain, tmp_path: Path, eventually: Eventually
) -> None:
    # Given a job whose accuracy only falls, and which keeps one checkpoint
    job = submit(
        plain,
        tmp_path / "task",
        'return {"count": torch.tensor(len(batch)), "accuracy": -model.count[batch].sum()}',
        epochs=3,
        checkpoint={"keep": 1},
    )

    # Then two are left at its end: that of the first epoch, and the model
    done = await_end(plain, job, eventually)
    first, _, last = done.evaluations
    assert done.best == first
    assert {each.version for each in plain.checkpoints(job).all()} == {first.version, last.version}
    assert set(plain.jobs.checkpoints(job)) == {each.name for each in plain.checkpoints(job).all()}


@pytest.mark.parametrize(
    ("loss", "best"), [("model.count[batch].sum()", 1), ("-model.count[batch].sum()", 3)]
)
def test_best_model_without_an_accuracy_has_the_lowest_loss(
    plain: Plain, tmp_path: Path, eventually: Eventually, loss: str, best: int
) -> None:
    job = submit(
        plain,
        tmp_path / "task",
        f'return {{"count": torch.tensor(len(batch)), "loss": {loss}}}',
        epochs=3,
        checkpoint={"keep": 1},
    )

    done = await_end(plain, job, eventually)
    kept = {done.evaluations[best - 1].version, done.evaluations[-1].version}
    assert done.best == done.evaluations[best - 1]
    assert {each.version for each in plain.checkpoints(job).all()} == kept


@pytest.fixture
def small_disk(plain: Plain) -> Iterator[Path]:
    """The storage, on a file system of its own that is soon full."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = plain.home / "storage"
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        plain.end()
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves no room for anything else."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(free.f_bavail * free.f_frsize))
    return filler


def test_a_full_disk_stops_no_training_and_is_said(
    plain: Plain, small_disk: Path, eventually: Eventually
) -> None:
    # Given a job with a checkpoint of 160 kB every half second
    job = plain.submit_audit(
        samples=40_000,
        epochs=2,
        subtasks=20,
        args={"batch_size": 500},
        step_seconds=0.02,
        checkpoint={"every": 0.5},
    )

    # When the disk is full
    filler = fill(small_disk)
    plain.start_server()
    plain.start_keeper()
    plain.start_workers(job, 2)

    # Then the job says that there are no checkpoints, and trains to its end
    (said,) = eventually(lambda: plain.events(job, "checkpoint-failed"))
    assert "No space left" in said["text"]
    eventually(lambda: plain.jobs.get(job).finished_epochs == 2)
    eventually(lambda: plain.jobs.get(job).state is JobState.FINISHING)
    assert plain.jobs.checkpoints(job) == {}

    # and when there is room again, the model is stored, and the job succeeds
    filler.unlink()
    eventually(lambda: plain.jobs.get(job).state is JobState.SUCCEEDED)
    done = plain.jobs.get(job)
    assert done.model is not None
    assert plain.checkpoints(job).read(done.model).floats.unique().tolist() == [2.0]
    assert len(plain.events(job, "checkpoint-failed")) == 1


def test_a_model_that_is_lost_before_it_is_stored_is_trained_again(
    plain: Plain, small_disk: Path, eventually: Eventually
) -> None:
    # Given a job that can't store its model, since the disk has been full for a while
    training = Training(plain, epochs=1, max_epoch_lead=0)
    start(training)
    training.reach(200)
    plain.checkpoint(training.job)
    training.run_freely()
    filler = fill(small_disk)
    eventually(lambda: plain.jobs.get(training.job).state is JobState.FINISHING)

    # When the model is lost, and there is room again
    plain.server.kill()
    plain.tensors.kill()
    filler.unlink()
    plain.tensors.start()
    plain.start_server()

    # Then the job goes back, and ends as it should
    training.succeed()
    assert 0 < training.trained_again() <= 200
    assert kinds(plain, training.job).count("job-running") == 2


def test_a_damaged_checkpoint_is_never_taken_for_the_finished_model(
    plain: Plain, eventually: Eventually
) -> None:
    # Given a job that is done but for its last words: the keeper dies before it stores the model
    training = Training(plain, epochs=1, max_epoch_lead=0)
    training.start(2)
    training.reach(200)
    plain.checkpoint(training.job)
    training.run_freely()
    eventually(lambda: plain.jobs.get(training.job).finished_epochs == 1)

    # When the checkpoint of its last version is damaged, and both servers lose the model
    damaged = plain.checkpoint(training.job)
    version = plain.checkpoints(training.job).read(damaged).whole[0].meta.version
    plain.damage_checkpoint(training.job, damaged)
    plain.server.kill()
    plain.tensors.kill()
    plain.tensors.start()
    plain.start_server()

    # Then the work since the checkpoint before is done again, up to the very same version,
    # and the job ends with a model that is whole
    plain.start_keeper()
    job = training.succeed()
    assert job.version == version
    assert job.model != damaged
    assert len(plain.events(job.id, "checkpoint-damaged")) == 1


# --- when it dies itself -------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [0.25], indirect=True, ids=["short leases"])
def test_the_keeper_may_die_at_any_time(plain: Plain, eventually: Eventually) -> None:
    # Given a job with many checkpoints
    training = Training(plain, samples=1200, checkpoint={"every": 0.2})
    plain.start_server()
    keeper = plain.start_keeper()
    training.add_workers(2)

    # When its keeper is killed again and again, from the start to the end
    deaths, seen = 0, 1
    while not plain.jobs.get(training.job).state.over:
        eventually(lambda seen=seen: len(plain.jobs.events(training.job)) > seen)
        keeper.kill()
        deaths, seen = deaths + 1, seen + 1
        keeper = plain.start_keeper()
        if deaths == 5:
            training.run_freely()

    # Then the job comes to its one end all the same
    assert deaths >= 5
    training.succeed()
    told = kinds(plain, training.job)
    assert told.count("job-running") == told.count("job-succeeded") == 1
    assert training.trained_again() <= training.most_again(killed=0)


@pytest.mark.parametrize("plain", [0.25], indirect=True, ids=["short leases"])
def test_an_evaluation_whose_worker_dies_is_made_by_another(
    plain: Plain, tmp_path: Path, eventually: Eventually
) -> None:
    # Given two workers, one of them in the middle of a long evaluation
    hold = tmp_path / "hold"
    hold.touch()
    job = submit(
        plain,
        tmp_path / "task",
        f"""while pathlib.Path({str(hold)!r}).exists(): time.sleep(0.02)
                return super().evaluate(model, batch)""",
        epochs=1,
    )
    plain.start_worker(job)
    victim = eventually(lambda: plain.jobs.leases(job).get("evaluate:1"))

    # When that one is killed
    plain.workers[victim].kill()
    hold.unlink()

    # Then the other one evaluates the epoch, once
    done = await_end(plain, job, eventually)
    (evaluation,) = done.evaluations
    assert evaluation.worker != victim
    assert evaluation.metrics["applied"] == 1.0
    assert kinds(plain, job).count("evaluated") == 1
