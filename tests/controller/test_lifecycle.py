"""The life of a job, from its submission to its stored model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.harness import Harness
from support.processes import run_program
from support.training import BATCH, Training
from support.waiting import PATIENCE, await_truth

from vcasgd.controller.jobs.lifecycle import JobLifecycle
from vcasgd.storage.objects import Storage
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.placement import Owners, Suspect
from vcasgd.store.ledger.retention import Retention
from vcasgd.threads import DaemonThreads


def kinds(harness: Harness, job: str) -> list[str]:
    return [event["kind"] for event in harness.jobs.events(job)]


# --- ends of jobs ---------------------------------------------------------------------------


def test_job_ends_with_the_model_that_was_evaluated_last(harness: Harness) -> None:
    # Given a job whose epochs do not overlap
    training = Training(harness, epochs=3, max_epoch_lead=0)

    # When it has ended
    training.start_with_job_loop()
    job = training.await_success()

    # Then every epoch was evaluated once, on the model at its end
    assert [each.epoch for each in job.evaluations] == [1, 2, 3]
    assert [each.metrics["applied"] for each in job.evaluations] == [1.0, 2.0, 3.0]
    assert kinds(harness, job.id).count("evaluated") == 3

    # and the stored model is the last of them
    assert job.model is not None
    stored = harness.checkpoints(job.id).read(job.model).whole[0]
    assert stored.meta.version == job.evaluations[-1].version
    assert stored.record.finished == 3
    assert job.reason == "all 3 epochs are done"

    # and its history contains these events in order
    history = [kind for kind in kinds(harness, job.id) if kind not in ("evaluated", "checkpoint")]
    assert history == ["submitted", "job-running", "job-finishing", "job-succeeded"]

    # and the tensors server is empty
    await_truth(lambda: harness.tensors.connection.dbsize() == 0)


def test_job_that_stops_improving_ends_with_its_best_model(
    harness: Harness, tmp_path: Path
) -> None:
    # Given a task whose accuracy rises up to the second epoch, and then falls
    job = submit(
        harness,
        tmp_path / "task",
        "c = model.count[batch].mean(); "
        'return {"count": torch.tensor(1), "accuracy": torch.minimum(c, 4 - c)}',
        held_after=5,
        epochs=50,
        stop={"patience": 2},
    )

    done = await_end(harness, job)

    assert done.state is JobState.SUCCEEDED
    assert done.final_evaluation == 2
    expected = r"accuracy 200\.00% in epoch 2 was not improved by [23] evaluations in a row"
    assert re.fullmatch(expected, done.reason or "")
    assert [each["text"] for each in harness.events(job, "job-finishing")] == [done.reason]
    assert counts_of(harness, done) == [2.0] * 100


def test_job_stops_at_its_target_although_the_next_epoch_is_worse(
    harness: Harness, tmp_path: Path
) -> None:
    # Given a task that reaches its target in the second epoch only, while no job loop runs
    job = submit(
        harness,
        tmp_path / "task",
        'return {"count": torch.tensor(len(batch)), "cost": (model.count[batch] - 2).abs().sum()}',
        job_loop=False,
        epochs=4,
        stop={"metric": {"name": "cost", "mode": "min", "target": 0.5}},
    )
    harness.start_job_when_ready(job)
    await_truth(lambda: len(harness.jobs.get(job).evaluations) >= 3)

    # When the job loop starts
    harness.start_job_loop()

    # Then the job ends with the model of the second epoch
    done = await_end(harness, job)
    assert done.final_evaluation == 2
    assert done.reason == "cost 0 reached 0.5 in epoch 2"
    assert counts_of(harness, done) == [2.0] * 100


def test_job_stops_after_its_max_duration(harness: Harness, tmp_path: Path) -> None:
    # Given a job that would take an hour and has a limit of one second
    job = submit(harness, tmp_path / "task", "", epochs=5000, stop={"max_duration": 1})

    # Then it ends with the epoch that was evaluated last
    done = await_end(harness, job)
    assert done.final_evaluation is not None
    assert (
        done.reason
        == f"max_duration has passed; the last evaluation is of epoch {done.final_evaluation}"
    )
    assert counts_of(harness, done) == [float(done.final_evaluation)] * 100


def submit(
    harness: Harness,
    directory: Path,
    evaluate: str,
    *,
    job_loop: bool = True,
    held_after: int = 1_000_000,
    **fields: Any,
) -> str:
    """Submit the audit with another evaluation and 100 samples in 5 subtasks; start a worker.

    Evaluations of epochs after ``held_after`` never end, so a slow job loop sees no more of them.
    """
    code = f"""
        import pathlib, time, torch
        from vcasgd.chaos.task.audit import Audit

        class Mine(Audit):
            def evaluate(self, model, batch):
                while model.count.max() > {held_after}: time.sleep(0.02)
                {evaluate or "return super().evaluate(model, batch)"}
        """
    directory.mkdir()
    (directory / "train.py").write_text(textwrap.dedent(code))
    harness.start_server()
    if job_loop:
        harness.start_job_loop()
    job = harness.submit_audit(
        samples=100,
        subtasks=5,
        max_epoch_lead=0,
        working_dir=directory,
        task="train:Mine",
        **fields,
    )
    harness.start_worker(job)
    return job


def counts_of(harness: Harness, done: JobRecord) -> list[float]:
    """Return how often the final model of a job contains each sample."""
    assert done.model is not None
    counts: list[float] = harness.checkpoints(done.id).read(done.model).floats.tolist()
    return counts


def await_end(harness: Harness, job: str) -> JobRecord:
    await_truth(lambda: harness.jobs.get(job).state.over)
    done = harness.jobs.get(job)
    assert done.state is JobState.SUCCEEDED, done.reason
    return done


# --- pause and cancel ------------------------------------------------------------------


def test_paused_job_keeps_its_work_and_continues_when_resumed(harness: Harness) -> None:
    # Given a running job that pushes at the end of long subtasks only
    training = Training(harness, push_every="subtask")
    names = training.start_with_job_loop()
    # Of one of them; the other may start late.
    await_truth(lambda: any(len(training.steps_of(name)) >= 30 for name in names))

    # When it is paused
    harness.jobs.pause(training.job)

    # Then the workers push their work and leave, and training stops
    assert [training.worker(name).wait() for name in names] == [0, 0]
    trained = BATCH * len(training.steps())
    await_truth(lambda: harness.applied(training.job) == trained)
    (late,) = training.add_workers(1)
    assert training.worker(late).wait() == 0
    assert harness.applied(training.job) == trained == BATCH * len(training.steps())

    # and when it is resumed, it continues from there
    harness.jobs.resume(training.job)
    training.add_workers(2)
    training.await_success()
    assert training.unexplained_repeats() == 0


def test_cancelled_job_releases_everything_at_once(harness: Harness) -> None:
    # Given a running job
    training = Training(harness, samples=4000)
    names = training.start_with_job_loop()

    # When it is cancelled
    harness.jobs.cancel(training.job)

    # Then its workers leave and its tensors are deleted, long before it would have ended
    assert [training.worker(name).wait() for name in names] == [0, 0]
    await_truth(lambda: harness.tensors.connection.dbsize() == 0)
    assert BATCH * len(training.steps()) < training.total

    # and they stay deleted
    beat = harness.server_heartbeat_at()
    await_truth(lambda: harness.server_heartbeat_at() > beat)
    # A call that was under way can write once more, which is deleted, too.
    await_truth(lambda: harness.tensors.connection.dbsize() == 0)
    assert "job-cancelled" in kinds(harness, training.job)
    assert harness.server.alive


# --- checkpoints --------------------------------------------------------------------------------


def test_checkpoints_follow_their_interval_and_number(harness: Harness) -> None:
    # Given a job that writes a checkpoint every half second and keeps two
    training = Training(
        harness, samples=4000, epochs=1, checkpoint={"every": 0.5, "keep": 2}, step_seconds=0.02
    )
    harness.start_server()
    job_loop = harness.start_job_loop()
    training.add_workers(2)

    # When it has written five
    written = await_truth(lambda: at_least(5, harness.events(training.job, "checkpoint")))

    # Then they are at least that far apart
    assert all(later["at"] - former["at"] > 0.45 for former, later in pairwise(written))

    # and only the last two are left, each of them complete
    checkpoints = harness.checkpoints(training.job)

    def is_between_two() -> bool:
        job_loop.freeze()
        stored = [each.name for each in checkpoints.all()]
        if stored != names_of(harness, training)[-2:]:
            job_loop.thaw()
            return False
        return True

    await_truth(is_between_two)
    for name in names_of(harness, training)[-2:]:
        loaded = checkpoints.read(name)
        plan = harness.jobs.get(training.job).plan
        assert plan is not None
        applied = loaded.whole[0].record.applied(plan).samples_applied
        assert loaded.floats.sum() == applied > 0
    assert list(harness.jobs.checkpoints(training.job)) == names_of(harness, training)[-2:]


def names_of(harness: Harness, training: Training) -> list[str]:
    """The names of all checkpoints that were written, oldest first."""
    written = harness.events(training.job, "checkpoint")
    return [event["details"]["name"] for event in written]


def at_least(number: int, rows: list[Any]) -> list[Any]:
    return rows if len(rows) >= number else []


class Held(ThreadPoolExecutor):
    """Writer of checkpoints that begins when it may."""

    def __init__(self) -> None:
        super().__init__(1)
        self.calls, self.begun = 0, threading.Event()

    def submit(self, call: Any, /, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return super().submit(lambda: (self.begun.wait(), call(*arguments, **options))[1])


@pytest.mark.ci
def test_checkpoint_that_is_written_while_its_job_is_deleted_does_not_stay(
    harness: Harness,
) -> None:
    # Given a job whose checkpoint is about to be written
    training, writer = Training(harness, checkpoint={"every": 0.1}), Held()
    training.start(1)
    ledger, nodes = harness.ledger.connection, [harness.tensors.connection]
    lifecycle = JobLifecycle(
        training.job, ledger=ledger, nodes=nodes, storage=harness.storage, writer=writer
    )
    await_truth(lambda: (lifecycle.step(), writer.calls)[1])

    # When it is canceled and deleted at that moment, with its checkpoints
    harness.jobs.cancel(training.job)
    harness.checkpoints(training.job).delete_all()
    Retention(ledger).delete(training.job)
    writer.begun.set()

    # Then nothing of it is left
    await_truth(lifecycle.clean_up)
    assert harness.storage.names("jobs") == {}


class Recording(ThreadPoolExecutor):
    """Writer of checkpoints that never begins."""

    calls = 0

    def submit(self, _call: Any, /, *_arguments: Any, **_options: Any) -> Any:
        self.calls += 1
        return Future()


@pytest.mark.ci
def test_storage_that_does_not_answer_holds_up_no_step(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job at its end, and a storage that does not answer
    training, writer = Training(harness, epochs=1, samples=100), Recording()
    training.start(1)
    training.release()
    await_truth(lambda: harness.jobs.get(training.job).evaluations)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        ledger, nodes = harness.ledger.connection, [harness.tensors.connection]
        storage = Storage("s3://bucket/storage")
        lifecycle = JobLifecycle(
            training.job, ledger=ledger, nodes=nodes, storage=storage, writer=writer
        )

        # Then the model is to be written, and other jobs don't wait for it
        def steps() -> int:
            lifecycle.step()
            return writer.calls

        DaemonThreads(1, "steps").submit(await_truth, steps).result(PATIENCE / 8)
    assert harness.jobs.get(training.job).state is JobState.FINISHING


@pytest.mark.ci
def test_best_model_is_kept_beside_the_last(harness: Harness, tmp_path: Path) -> None:
    # Given a job that keeps one checkpoint, and whose first epoch is the best
    job = submit(
        harness,
        tmp_path / "task",
        """loss = 9 * len(batch) + model.count[batch].sum()
                return {"count": torch.tensor(len(batch)), "loss": loss}""",
        epochs=3,
        checkpoint={"keep": 1},
    )

    # Then the best model and the final one are left at its end
    done = await_end(harness, job)
    assert done.best == done.evaluations[0]
    kept = harness.checkpoints(job).all()
    assert {each.version for each in kept} == {done.best.version, done.evaluations[-1].version}
    assert set(harness.jobs.checkpoints(job)) == {each.name for each in kept}


@pytest.fixture
def small_disk(harness: Harness) -> Iterator[Path]:
    """The storage on its own small file system."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = harness.home / "storage"
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = run_program(["mount", *options])
    if mounted.returncode != 0:
        pytest.skip(f"no small file system here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        harness.end()
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk with one file and return it."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(free.f_bavail * free.f_frsize))
    return filler


def test_full_disk_is_reported_and_stops_no_training(harness: Harness, small_disk: Path) -> None:
    # Given a job with a checkpoint of 160 kB every half second
    job = harness.submit_audit(
        samples=40_000,
        epochs=2,
        subtasks=20,
        args={"batch_size": 500},
        step_seconds=0.02,
        checkpoint={"every": 0.5},
    )

    # When the disk is full
    filler = fill(small_disk)
    harness.start_server()
    harness.start_job_loop()
    harness.start_workers(job, 2)

    # Then the job reports that checkpoints fail, and trains to its end
    (event,) = await_truth(lambda: harness.events(job, "checkpoint-failed"))
    assert "No space left" in event["text"]
    await_truth(lambda: harness.jobs.get(job).finished_epochs == 2)
    await_truth(lambda: harness.jobs.get(job).state is JobState.FINISHING)
    assert harness.jobs.checkpoints(job) == {}

    # and when the disk has room again, the model is stored and the job succeeds
    filler.unlink()
    await_truth(lambda: harness.jobs.get(job).state is JobState.SUCCEEDED)
    done = harness.jobs.get(job)
    assert done.model is not None
    assert harness.checkpoints(job).read(done.model).floats.unique().tolist() == [2.0]
    assert len(harness.events(job, "checkpoint-failed")) == 1


def test_model_lost_before_it_is_stored_is_trained_again(
    harness: Harness, small_disk: Path
) -> None:
    # Given a job that can't store its model because the disk is full
    training = Training(harness, epochs=1, max_epoch_lead=0)
    training.start_with_job_loop()
    training.await_samples(200)
    harness.checkpoint(training.job)
    filler = fill(small_disk)
    training.release()
    await_truth(lambda: harness.jobs.get(training.job).state is JobState.FINISHING)

    # When the model is lost and the disk has room again
    harness.server.kill()
    harness.tensors.kill()
    filler.unlink()
    harness.tensors.start()
    harness.start_server()

    # Then the job trains again and succeeds
    training.await_success()
    assert 0 < training.repeated_samples() <= 200 + training.most_repeated_samples(killed=0)
    assert kinds(harness, training.job).count("job-running") == 2


def test_work_of_an_owner_that_is_accused_at_the_end_is_undone(
    harness: Harness, small_disk: Path
) -> None:
    # Given a job that can't store its model because the disk is full
    every = {"every": 0.5, "keep": 50}
    training = Training(harness, epochs=1, max_epoch_lead=0, checkpoint=every)
    training.start_with_job_loop()
    listed = await_truth(lambda: harness.jobs.checkpoints(training.job))
    version = max(each["versions"][0] for each in listed.values())
    filler = fill(small_disk)
    training.release()
    await_truth(lambda: harness.jobs.get(training.job).state is JobState.FINISHING)

    # When a parameter server accuses an owner of updates after the checkpoint
    suspect = Suspect(why="it sent noise", shard=0, version=version)
    assert Owners(harness.ledger.connection).accuse(training.job, "mallory", suspect)

    # Then the job goes back to the checkpoint, trains again, and succeeds
    (event,) = await_truth(lambda: harness.events(training.job, "rolled-back"))
    assert event["details"]["owner"] == "mallory"
    name = event["details"]["name"]
    assert harness.jobs.checkpoints(training.job)[name]["versions"] == [version]
    filler.unlink()
    training.await_success()
    assert training.repeated_samples() > 0


@pytest.mark.ci
def test_damaged_checkpoint_is_not_used_as_the_final_model(harness: Harness) -> None:
    # Given a job that has finished its epochs, while no job loop runs to store the model
    training = Training(harness, epochs=1, max_epoch_lead=0)
    training.start(2)
    training.await_samples(200)
    harness.checkpoint(training.job)
    training.release()
    await_truth(lambda: harness.jobs.get(training.job).finished_epochs == 1)

    # When the checkpoint of its last version is damaged, and both servers lose the model
    damaged = harness.checkpoint(training.job)
    version = harness.checkpoints(training.job).read(damaged).whole[0].meta.version
    harness.damage_checkpoint(training.job, damaged)
    harness.server.kill()
    harness.tensors.kill()
    harness.tensors.start()
    harness.start_server()

    # Then the work since the previous checkpoint is repeated up to the same version,
    # and the job ends with an undamaged model
    harness.start_job_loop()
    job = training.await_success()
    assert job.version == version
    assert job.model != damaged
    assert len(harness.events(job.id, "checkpoint-damaged")) == 1


# --- deaths -------------------------------------------------------------------------


@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
def test_evaluation_of_a_dead_worker_is_made_by_another(harness: Harness, tmp_path: Path) -> None:
    # Given two workers, one of them in a long evaluation
    hold = tmp_path / "hold"
    hold.touch()
    job = submit(
        harness,
        tmp_path / "task",
        # The evaluation before the training has a new model.
        f"""while model.count.any() and pathlib.Path({str(hold)!r}).exists(): time.sleep(0.02)
                return super().evaluate(model, batch)""",
        epochs=1,
    )
    harness.start_worker(job)
    victim = await_truth(lambda: harness.jobs.leases(job).get("evaluate:1"))

    # When that one is killed
    harness.workers[victim].kill()
    hold.unlink()

    # Then the other worker evaluates the epoch, once
    done = await_end(harness, job)
    (evaluation,) = done.evaluations
    assert evaluation.worker != victim
    assert evaluation.metrics["applied"] == 1.0
    assert kinds(harness, job).count("evaluated") == 1
