"""Deaths of the processes of a worker that trains with several."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from support.counted_job import CountedJob, client_of
from support.harness import Harness
from support.waiting import await_truth

from vcasgd.schemas.fleet import WorkerRow
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.workers import WorkerBeats

TASKS = Path(__file__).parents[1] / "support" / "tasks"
EXAMPLES = Path(__file__).parents[2] / "examples"
#: Parts of a batch of 8 samples, of which each counts exactly.
RANKS = 4
#: Seconds of the example on a busy machine.
EXAMPLE_SECONDS = 600


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.ci
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_nothing_is_lost_when_ranks_die(tmp_path: Path, parallel: str) -> None:
    # Parts of a model are cut elsewhere than shards of its vector.
    nodes = 2 if parallel == "fsdp" else 1
    settings = Settings(home=tmp_path / "home", api_port=0, local_capacity=2, store_nodes=nodes)
    with client_of(settings) as client:
        # Given a job on two machines, each of which is a worker of several processes
        job = CountedJob(
            client, tmp_path, epochs=3, working_dir=str(TASKS), task="counted_mean:CountedMean",
            args={"samples": 1024, "batch_size": 8, "parallel": parallel}, padding=64,
            subtasks_per_epoch=16, push_every=2, workers={"min": 2, "max": 2, "gpus": RANKS},
        )  # fmt: skip

        processes = set[int]()

        def complete() -> WorkerRow:
            row = await_truth(lambda: training(client.job(job.id).workers()))
            processes.update(further(row.pid))
            return row

        # When a further process, the last one, and the first one of a worker die
        for victim in (1, -1, 0):
            row = complete()
            pid = [row.pid, *further(row.pid)][victim]
            os.kill(pid, signal.SIGKILL)
            await_truth(lambda pid=pid: not psutil.pid_exists(pid))
            job.await_updates(3)
        # And a machine with all of them
        row = complete()
        client.evict(row.name, kill=True)
        await_truth(lambda: not psutil.pid_exists(row.pid))
        job.await_updates(3)
        complete()

        # Then every sample was applied exactly once in each epoch
        view = job.finish()
        assert view.progress.samples_repeated == 0
    await_truth(lambda: not [pid for pid in processes if psutil.pid_exists(pid)])


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(EXAMPLE_SECONDS + 120)
def test_the_example_of_a_model_in_parts_trains_to_its_end(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", api_port=0, local_capacity=1)
    with client_of(settings) as client:
        spec = JobSpec.load(EXAMPLES / "text" / "fsdp.yaml")
        job = client.job(client.submit_directory(spec).id)
        view = job.wait(EXAMPLE_SECONDS)
        assert view.state == "succeeded", view.reason
        # Guesses have 4.56.
        assert view.evaluations[-1].metrics["loss"] < 3.4
        assert any(event.details.get("ranks") == RANKS for event in job.events())
        assert load_file(job.download(tmp_path / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(EXAMPLE_SECONDS + 120)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_trainer_of_hugging_face_trains_in_two_processes(tmp_path: Path, parallel: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra huggingface")
    example = EXAMPLES / "huggingface"
    text = (example / "train.py").read_text()
    made, wanted = "TrainerTask(make_trainer)", f'TrainerTask(make_trainer, parallel="{parallel}")'
    assert made in text
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text(text.replace(made, wanted))
    fields = JobSpec.load(example / "job.yaml").model_dump(mode="json")
    fields |= {"working_dir": str(tmp_path / "job"), "workers": {"max": 1, "gpus": 2}}
    settings = Settings(home=tmp_path / "home", api_port=0, local_capacity=1)
    with client_of(settings) as client:
        job = client.job(client.submit_directory(JobSpec.parse(fields)).id)
        view = job.wait(EXAMPLE_SECONDS)
        assert view.state == "succeeded", view.reason
        # One process ends between 0.9 and 1, by the weights that it begins with; guessing has 0.5.
        assert view.evaluations[-1].metrics["accuracy"] >= 0.88
        assert any(event.details.get("ranks") == 2 for event in job.events())


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(EXAMPLE_SECONDS + 120)
def test_no_process_has_a_model_that_is_in_parts(tmp_path: Path) -> None:
    """Parameters and gradients are two vectors, of which each of four ranks has a half.

    Buffers of libraries take up to a fifth of one more, and what the first rank sends and receives
    a third. A process with the model would have a vector and a half.
    """
    layers, notes = 64, tmp_path / "notes"
    notes.mkdir()
    settings = Settings(home=tmp_path / "home", api_port=0, local_capacity=1, store_nodes=2)
    with client_of(settings) as client:
        spec = JobSpec.parse({
            "name": "wide", "task": "sharded:Wide", "working_dir": str(TASKS), "epochs": 1,
            "args": {"layers": layers, "folder": str(notes)}, "workers": {"max": 1, "gpus": RANKS},
        })  # fmt: skip
        view = client.job(client.submit_directory(spec).id).wait(EXAMPLE_SECONDS)
    assert view.state == "succeeded", view.reason
    vector = 4 * layers * 1024 * 1025
    peaks = sorted(int(each.read_text()) / vector for each in notes.iterdir())
    assert len(peaks) == RANKS
    assert peaks[-2] < 0.9, peaks
    assert peaks[-1] < 1.1, peaks


@pytest.mark.slow
@pytest.mark.ci
def test_batches_follow_the_speeds_of_machines_with_one_and_four_gpus(harness: Harness) -> None:
    # Given a job on both, in which a sample takes as long on each GPU
    notes, samples = harness.home / "notes", 24_000
    notes.mkdir()
    (notes / "hold").touch()
    job = harness.submit(
        TASKS, task="ranked:Paced", epochs=1, push_every=4, subtasks_per_epoch=10,
        args={"samples": samples, "seconds": 0.02, "folder": str(notes)}, workers={"gpus": "all"},
    )  # fmt: skip
    harness.start_server()
    harness.start_job_loop()
    four = harness.start_worker(job, entry="support.four_gpus:main", fresh_env={"GPUS": "4"})

    def batch(worker: str, size: int) -> int:
        """Return the samples of the last step of all of a worker's processes."""
        pid = harness.workers[worker].pid
        files = [notes / str(each) for each in (pid, *further(pid))]
        steps = [each.read_text().split() for each in files if each.exists()]
        return sum(int(each[-1]) for each in steps) if len(steps) == size else 0

    await_truth(lambda: batch(four, 4) == 40)
    one = harness.start_worker(job)

    # Then one trains about a fifth of each batch, and four the rest
    await_truth(lambda: 4 <= batch(one, 1) <= 12 and 28 <= batch(four, 4) <= 36)

    (notes / "hold").unlink()
    await_truth(lambda: harness.jobs.get(job).state.over)
    view = harness.jobs.get(job)
    assert view.state is JobState.SUCCEEDED, view.failure
    assert (view.totals["samples"], view.totals["repeated"]) == (samples, 0)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("workers", "args", "chosen", "why"),
    [
        ({"max": 1}, {}, "all", "train as one worker"),
        ({"max": 1}, {"parallel": "fsdp", "batch_size": 8}, "all", "train as one worker"),
        ({"max": 4}, {}, 1, "up to 4 machines with 4 GPUs share a batch of 32"),
        ({"max": 1}, {"fault": "sums"}, 1, "its loss is a sum over samples"),
        ({"max": 1}, {"fault": "apart"}, 1, "this rank can't evaluate"),
    ],
)
def test_the_first_machine_chooses_how_its_gpus_train(
    harness: Harness, workers: dict[str, Any], args: dict[str, Any], chosen: str | int, why: str
) -> None:
    # Given a job that doesn't say how many GPUs are a worker
    job = harness.submit(
        TASKS, task="ranked:Ranked", epochs=1, args={"batch_size": 32, **args}, workers=workers
    )
    harness.start_server()
    harness.start_job_loop()

    worker = harness.start_worker(job, entry="support.four_gpus:main", fresh_env={"GPUS": "4"})

    # Then they are one worker if their batches are large enough and can be shared
    await_truth(lambda: harness.jobs.get(job).state.over)
    view = harness.jobs.get(job)
    assert view.state is JobState.SUCCEEDED, view.failure
    (event,) = [each for each in harness.jobs.events(job) if each["kind"] == "gpus-chosen"]
    assert event["details"]["gpus"] == chosen
    assert why in event["text"]
    together = "trains with 4 processes" in (harness.home / f"{worker}.log").read_text()
    assert together == (chosen == "all" or args == {"fault": "apart"})


@pytest.mark.slow
@pytest.mark.ci
def test_later_machines_follow_the_first(harness: Harness) -> None:
    # Given a job whose first machine has no choice
    job = harness.submit(
        TASKS, task="ranked:Ranked", epochs=1000, args={"batch_size": 64}, workers={"max": 2}
    )
    harness.start_server()
    harness.start_job_loop()
    harness.start_worker(job)
    await_truth(lambda: harness.jobs.get(job).state is JobState.RUNNING)

    # When one with four GPUs joins
    four = harness.start_worker(job, entry="support.four_gpus:main", fresh_env={"GPUS": "4"})

    # Then its worker has one of them
    beats = WorkerBeats(harness.ledger.connection)
    beat = await_truth(lambda: (one := beats.of(job).get(four)) and one.steps and one)
    assert (beat.gpus, beat.ranks) == (4, 1)
    assert not [each for each in harness.jobs.events(job) if each["kind"] == "gpus-chosen"]


def training(rows: list[WorkerRow]) -> WorkerRow | None:
    """Return a worker with all of its processes."""
    complete = (row for row in rows if row.pid and len(further(row.pid)) == RANKS - 1)
    return next(complete, None)


def further(pid: int) -> list[int]:
    try:
        return [one.pid for one in psutil.Process(pid).children() if is_rank(one)]
    except psutil.NoSuchProcess:
        return []


def is_rank(process: psutil.Process) -> bool:
    try:
        return "vcasgd.worker.rank" in process.cmdline()
    except psutil.Error:
        return False
