"""A worker reports errors of the user's code at once, with their traceback."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.harness import Harness, RedisServer
from support.servers import FaultyProxy, SlowLink, url_of
from support.training import BATCH, Training
from support.waiting import await_truth

from vcasgd.controller.jobs.failures import ATTEMPTS
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import JobRecord, JobState

#: Parameters of a model whose shards travel in turn.
LARGE = 5_000_000


@pytest.fixture(scope="module")
def shared_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Servers and a job loop for jobs that fail by themselves."""
    harness = Harness(tmp_path_factory.mktemp("harness"))
    try:
        harness.start_server()
        harness.start_job_loop()
        yield harness
    finally:
        harness.end()


class User:
    """A user with a task to submit."""

    def __init__(self, harness: Harness, directory: Path) -> None:
        self.harness = harness
        self.directory = directory

    def submit(self, code: str, workers: int = 1, **fields: Any) -> str:
        """Submit a job of 100 samples in 5 subtasks; ``code`` is the module with class ``Mine``."""
        head = "import torch\nfrom vcasgd.chaos.task.audit import Audit\n\n"
        (self.directory / "train.py").write_text(head + textwrap.dedent(code))
        options = {"samples": 100, "subtasks": 5, "epochs": 1, "push_every": 1, **fields}
        job = self.harness.submit_audit(working_dir=self.directory, task="train:Mine", **options)
        self.harness.start_workers(job, workers)
        return job

    def await_state(self, job: str, state: JobState) -> JobRecord:
        await_truth(lambda: self.harness.jobs.get(job).state is state)
        return self.harness.jobs.get(job)


@pytest.fixture
def user(shared_harness: Harness, tmp_path: Path) -> User:
    return User(shared_harness, tmp_path)


# --- the user's code can't be loaded --------------------------------------------------


def test_a_task_that_cannot_be_imported_fails_the_job_with_the_users_traceback(
    user: User,
) -> None:
    # Given a module with an import that doesn't exist
    job = user.submit("import sklearm\n\nclass Mine(Audit): ...")

    # Then the job fails and shows the user's line
    failed = user.await_state(job, JobState.FAILED)
    assert failed.reason is not None
    assert failed.reason.startswith("task: train:Mine can't be loaded: ModuleNotFoundError")
    assert failed.traceback is not None
    assert "import sklearm" in failed.traceback
    assert "train.py" in failed.traceback

    # and the worker leaves
    assert list(user.harness.workers.values())[-1].wait() == 0


#: A learning rate that makes the first step overflow float32.
OVERFLOWS = """
class Mine(Audit):
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=3e38)

    def loss(self, model, batch):
        return 10 * super().loss(model, batch)
"""
#: A loss that is NaN from the start.
NAN = """
class Mine(Audit):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")
"""
#: A sampler whose second epoch is shorter, as one that fills batches by classes.
SHRINKS = """
class Shorter(torch.utils.data.Sampler):
    length = 100

    def __iter__(self):
        yield from range(self.length)
        self.length -= 10

class Mine(Audit):
    def sampler(self, dataset):
        return Shorter()
"""
#: A metric that is missing.
EVALUATES = """
class Mine(Audit):
    def evaluate(self, model, batch):
        raise KeyError('top5')
"""


@pytest.mark.parametrize(
    ("code", "fields", "reason"),
    [
        ("class Mine(Audit):\n    def model(self): raise OSError('no layer')", {}, "no layer"),
        ("raise SystemExit('good bye')", {}, "good bye"),
        ("class Mine(Audit): ...", {"samples": 0}, "the training data set is empty"),
        (NAN, {"workers": 3, "epochs": 1000}, "the loss is nan in local step 1"),
        (OVERFLOWS, {}, "the model's parameters are no longer finite"),
        (EVALUATES, {}, "evaluate raised KeyError: 'top5'"),
        pytest.param(
            *(SHRINKS, {"epochs": 2}, "Shorter has 90 draws in epoch 2, and 100 in the first one"),
            marks=pytest.mark.ci,
        ),
    ],
    ids=["model", "exit", "data", "loss", "parameters", "evaluation", "sampler"],
)
def test_code_that_never_works_fails_the_job_before_anything_is_trained(
    user: User, code: str, fields: dict[str, Any], reason: str
) -> None:
    failed = user.await_state(user.submit(code, **fields), JobState.FAILED)

    assert reason in (failed.reason or "")
    assert failed.totals.get("updates", 0) == 0
    pieces = [failure.piece for failure in user.harness.jobs.failures(failed.id)]
    # Another machine may be right.
    assert max(map(pieces.count, pieces)) >= ATTEMPTS


def test_an_error_at_one_sample_fails_the_job_after_three_attempts(
    user: User, tmp_path: Path
) -> None:
    # Given a sample that can't be trained, and two workers that train
    job = user.submit(
        f"""
        import os, time
        from pathlib import Path

        folder = Path({str(tmp_path)!r})
        (folder / f"starts-{{os.getpid()}}").touch()

        class Mine(Audit):
            def loss(self, model, batch):
                # The other one may find no other work any more.
                deadline = time.monotonic() + 120
                while 7 in batch and len(list(folder.glob("starts-*"))) < 2:
                    assert time.monotonic() < deadline, "the other worker starts"
                    time.sleep(0.05)
                if 7 in batch:
                    raise ZeroDivisionError("sample 7 is empty")
                return super().loss(model, batch)
        """,
        workers=2,
        push_every=2,
    )

    # Then the same subtask is tried three times, by both workers
    failed = user.await_state(job, JobState.FAILED)
    failures = user.harness.jobs.failures(job)
    assert len(failures) >= 3
    assert len({failure.piece for failure in failures}) == 1
    assert len({failure.worker for failure in failures}) == 2
    assert failed.reason == "loss raised ZeroDivisionError: sample 7 is empty"
    assert failed.traceback is not None
    assert 'raise ZeroDivisionError("sample 7 is empty")' in failed.traceback


def test_a_transient_error_does_no_harm(user: User) -> None:
    # Given an error that occurs once on every machine
    job = user.submit(
        """
        seen = []

        class Mine(Audit):
            def loss(self, model, batch):
                if not seen:
                    seen.append(batch)
                    raise ConnectionError("the data is not here yet")
                return super().loss(model, batch)
        """,
        workers=2,
    )

    # Then the job succeeds, and still counts each sample once
    done = user.await_state(job, JobState.SUCCEEDED)
    assert {failure.message for failure in user.harness.jobs.failures(job)} == {
        "loss raised ConnectionError: the data is not here yet"
    }
    assert done.model is not None
    model = user.harness.checkpoints(job).read(done.model).floats
    assert model.tolist() == [1.0] * 100


@pytest.mark.parametrize(
    ("rate", "padding", "chosen", "codec"),
    [
        (20e6, LARGE, None, "int2"),
        pytest.param(20e6, LARGE, "float32", "float32", marks=pytest.mark.extended),
        (20e6, 0, None, "float32"),
    ],
    ids=["slow", "the user's", "small"],
)
@pytest.mark.ci
def test_updates_are_encoded_as_the_first_workers_link_needs_it(
    user: User, rate: float, padding: int, chosen: str | None, codec: str
) -> None:
    # Given a worker with a slow link to the store
    server = user.harness.tensors
    assert isinstance(server, RedisServer)
    with closing(FaultyProxy(server, SlowLink(rate))) as link:
        job = user.submit(
            "class Mine(Audit): pass",
            update={"rule": "rounds", **({"codec": chosen} if chosen else {})},
            args={"padding": padding},
            push_every=None,
            epochs=3,
            workers=0,
        )

        # When it trains a job
        store = {"VCASGD_TENSORS_URL": url_of(server, 0, link.port)}
        user.harness.start_worker(job, env=store)

        # Then all samples count once, in updates of the codec that fits
        done = user.await_state(job, JobState.SUCCEEDED)
    assert done.facts is not None
    assert done.facts.update(done.spec).codec == codec
    assert done.totals["samples"] == 300
    events = user.harness.jobs.events(job)
    assert [each["kind"] for each in events].count("codec-chosen") == (codec == "int2")


def test_what_the_users_code_prints_is_in_the_jobs_log(user: User) -> None:
    # Given a task that prints
    job = user.submit(
        """
        class Mine(Audit):
            def model(self):
                print("a line of the user's")
                return super().model()
        """
    )

    # Then the log has its lines with the worker's name
    user.await_state(job, JobState.SUCCEEDED)
    lines = user.harness.jobs.logs(job)
    (printed,) = {(each["worker"], each["line"]) for each in lines if "user" in each["line"]}
    assert printed == (list(user.harness.workers)[-1], "a line of the user's")


# --- the user's code hangs ------------------------------------------------------------


@pytest.mark.parametrize("harness", [0.05], indirect=True, ids=["fast heartbeat"])
def test_a_worker_that_hangs_in_the_users_code_loses_its_lease_despite_heartbeats(
    harness: Harness, tmp_path: Path
) -> None:
    # Given a task that hangs on the first machine
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "train.py").write_text(HANGING)
    job = harness.submit_audit(
        samples=100,
        subtasks=2,
        epochs=1,
        working_dir=tmp_path / "task",
        task="train:Mine",
        args={"marker": str(tmp_path / "hangs")},
    )
    harness.start_server()
    hanging = harness.start_worker(job)
    harness.start_job_when_ready(job)
    await_truth((tmp_path / "hangs").exists)
    assert harness.jobs.leases(job) == {"train:0": hanging}

    # whose lease is renewed for a while, because a step may take long
    def until() -> float:
        return float(harness.ledger.connection.zscore(LedgerKeys(job).leases, "train:0"))

    first = (tmp_path / "hangs").stat().st_mtime + harness.settings.lease_seconds
    await_truth(lambda: until() > 1000 * first)

    # When another worker comes
    other = harness.start_worker(job)

    # Then it gets the lease once the first one makes no step for too long
    await_truth(lambda: harness.jobs.leases(job).get("train:0") != hanging)
    await_truth(lambda: harness.jobs.get(job).finished_epochs == 1)
    assert harness.vector(job).tolist() == [1.0] * 100

    # although the first one still sends heartbeats
    beat = harness.jobs.workers.heartbeats(job)[hanging].at or 0.0
    await_truth(lambda: (harness.jobs.workers.heartbeats(job)[hanging].at or 0.0) > beat)
    await_truth(lambda: harness.jobs.workers.heartbeats(job)[other].samples == 100)


HANGING = """
import itertools, os, threading
from vcasgd.chaos.task.audit import Audit

calls = itertools.count()

class Mine(Audit):
    def __init__(self, marker, **args):
        super().__init__(**args)
        self.marker = marker

    def loss(self, model, batch):
        if next(calls) == 0:  # the rehearsal of the first worker
            return super().loss(model, batch)
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().loss(model, batch)
        threading.Event().wait()
"""


# --- memory ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ci
def test_memory_does_not_grow_with_the_number_of_updates(harness: Harness) -> None:
    # Given a model of a million numbers, and a worker that pushes after every step
    training = Training(
        harness, samples=1_000_000, epochs=1, subtasks=100, push_every=1, step_seconds=0
    )
    (name,) = training.start(1)
    watched = {
        "worker": training.worker(name),
        "server": harness.server,
        "tensors": harness.tensors.process,
    }

    # When another 80 updates are applied after the first 40
    training.await_samples(40 * BATCH)
    before = {who: process.resident_bytes() for who, process in watched.items()}
    training.await_samples(120 * BATCH)

    # Then no process has grown by more than a few updates
    update = 4 * 1_000_000
    for who, process in watched.items():
        grown = process.resident_bytes() - before[who]
        assert grown < 10 * update, f"{who} grew by {grown / 1e6:.0f} MB"
