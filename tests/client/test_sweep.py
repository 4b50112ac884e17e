"""Sweeps over fields of a job file, and comparison of jobs, against a real API."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from support.api_harness import Api, spec
from support.waiting import PATIENCE, await_truth
from typer.testing import CliRunner

from vcasgd.cli.commands import app
from vcasgd.client import Client
from vcasgd.client import sweep as sweeps
from vcasgd.client.sweep import (
    Axis,
    Sweep,
    SweepOptions,
    below_median,
    best_qualities,
    compare,
    grid,
    member_name,
    sample,
)
from vcasgd.errors import Conflict, SpecError, VcasgdError
from vcasgd.spec.job import JobSpec
from vcasgd.spec.sections import Metric
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.leases import Lease, WorkKind

#: Seconds between two evaluations of a job; several looks of a sweep.
STEP_SECONDS = 0.1
JOB_FILE = "{name: digits, task: 'train:Digits', epochs: 3, subtasks_per_epoch: 5, args: {lr: 1}}"


class TestTrials:
    def test_a_grid_has_all_combinations(self) -> None:
        axes = [Axis.parse("args.lr=0.1, 0.01"), Axis.parse("args.sizes=[1,2],[3]")]

        assert grid(axes) == [
            ("args.lr=0.1", "args.sizes=[1,2]"),
            ("args.lr=0.1", "args.sizes=[3]"),
            ("args.lr=0.01", "args.sizes=[1,2]"),
            ("args.lr=0.01", "args.sizes=[3]"),
        ]

    def test_draws_are_different_within_their_ranges_and_repeatable(self) -> None:
        axes = [Axis.parse(f"{name}={name}(0.001,10)") for name in ("log", "uniform", "int")]
        axes.append(Axis.parse("codec=int8,float32"))

        drawn = sample(axes, 50, seed=1)

        assert drawn == sample(axes, 50, seed=1) != sample(axes, 50, seed=2)
        assert len(set(drawn)) == 50
        rows = [dict(change.split("=") for change in trial) for trial in drawn]
        assert all(0.001 <= float(row["log"]) <= 10 and 1 <= int(row["int"]) <= 10 for row in rows)
        assert sum(float(row["log"]) < 0.1 for row in rows) > 10, "as many in each decade"
        assert {row["codec"] for row in rows} == {"int8", "float32"}
        assert len(sample([Axis.parse("a=1,2")], 50, seed=0)) == 2, "there are no more"

    @pytest.mark.parametrize(
        "text",
        ["lr", "=1", "lr=", "lr=log(0,1)", "lr=uniform(2,1)", "lr=int(a,b)", "lr=int(0.2,0.8)"],
    )
    def test_an_invalid_axis_is_refused(self, text: str) -> None:
        with pytest.raises(SpecError, match="--over"):
            Axis.parse(text)

    def test_a_range_needs_draws_and_a_grid_is_bounded(self) -> None:
        with pytest.raises(SpecError, match="a range has no combinations"):
            grid([Axis.parse("lr=log(0.1,1)")])
        with pytest.raises(SpecError, match="1600 combinations are too many"):
            grid([Axis("a", ("1",) * 40), Axis("b", ("1",) * 40)])


def test_names_tell_the_changes_and_fit() -> None:
    assert member_name("digits", ("args.lr=1e-2", "batch=[8, 4]")) == ("digits--lr-1e-2-batch-8-4")
    assert member_name("digits", ("name=other",)) == "digits"
    names = {member_name("a" * 60, (f"args.lr={one}",)) for one in range(9)}
    assert len(names) == 9, "long names are cut, and stay distinct"
    for name in names:
        JobSpec.parse({"name": name, "task": "train:Digits", "epochs": 1})


def test_a_job_below_the_median_of_the_same_time_stops() -> None:
    jobs = {"good": [0.5, 0.9], "fair": [0.4, 0.8], "bad": [0.1], "early": []}

    assert below_median(jobs, after=1) == ["bad"]
    assert below_median(jobs, after=2) == [], "two jobs have no median"


@contextmanager
def training(api: Api, stopping: float | None = None) -> Iterator[None]:
    """Run all jobs as the platform does: each evaluation measures the job's learning rate.

    A job with the rate ``stopping`` stays after its first evaluation.
    """
    ended = threading.Event()

    def active() -> dict[str, JobRecord]:
        jobs = api.jobs.all(tuple(state for state in JobState if not state.over))
        return {job.id: job for job in jobs}

    def work() -> None:
        while not ended.wait(STEP_SECONDS):
            for job in active().values():
                if job.evaluations and job.spec.args["lr"] == stopping:
                    continue
                try:
                    _advance(api, job.id, job.spec, len(job.evaluations), job.state)
                except (AssertionError, VcasgdError):
                    # The test may have canceled or deleted it meanwhile.
                    if job.id in active():
                        raise

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        try:
            yield
        finally:
            ended.set()
            running.result(PATIENCE)


def _advance(api: Api, job: str, of: JobSpec, done: int, state: JobState) -> None:
    if state is JobState.STARTING:
        api.start_job(job)
    elif done == of.epochs:
        # It may have been canceled meanwhile.
        api.jobs.transition(job, JobState.SUCCEEDED, [JobState.RUNNING], why="it succeeded")
    else:
        api.account(job, 10 * (done + 1), done + 1)
        lease = api.leases(job).acquire(WorkKind.EVALUATE)
        result = {"version": 10 * (done + 1), "metrics": {"loss": of.args["lr"] / (done + 1)},
                  "worker": "w-1", "seconds": 1.0, "at": 1.0}  # fmt: skip
        if isinstance(lease, Lease):  # The job was canceled meanwhile otherwise.
            api.leases(job).report_evaluation(lease, result)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("class Digits: ...")
    (folder / "job.yaml").write_text(JOB_FILE)
    return folder


def trials(code: Path, *rates: float) -> dict[tuple[str, ...], JobSpec]:
    return {
        (f"args.lr={rate}",): spec(epochs=3, args={"lr": rate}, working_dir=str(code))
        for rate in rates
    }


def run(api: Api, *words: object) -> Result:
    """Run a command of the command line against the API."""
    env = {"VCASGD_API_URL": api.url, "VCASGD_TOKEN": api.token}
    return CliRunner(env=env).invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "POLL_SECONDS", 0.02)


def test_the_worst_job_ends_early_and_the_best_one_is_first(
    api: Api, client: Client, code: Path
) -> None:
    options = SweepOptions("s", at_once=5, early_stop=1, metric=Metric(name="loss", mode="min"))
    lines: list[str] = []

    with training(api, stopping=50):
        jobs = Sweep(client, trials(code, 1, 2, 3, 4, 50), options, lines.append).run()

    states = {job.spec.args["lr"]: job.state for job in jobs}
    assert states[1] == "succeeded"
    assert states[50] == "cancelled"
    assert any("worse than the median" in line for line in lines)
    rows = compare(jobs)
    assert rows[0]["differences"] == {"args.lr": 1}
    assert (rows[0]["metric"], rows[0]["best"]) == ("loss", pytest.approx(1 / 3))
    assert rows[0]["best"] == min(row["best"] for row in rows)
    assert best_qualities(client.job(rows[0]["job"])) == pytest.approx([-1, -1 / 2, -1 / 3])


def test_a_sweep_runs_so_many_jobs_at_a_time_and_continues_after_an_interruption(
    api: Api, client: Client, code: Path
) -> None:
    # Given a sweep that is interrupted after its first job
    def interrupt(line: str) -> None:
        if "succeeded" in line:
            raise KeyboardInterrupt

    options, most = SweepOptions("s", at_once=2), []
    with training(api):
        with pytest.raises(KeyboardInterrupt):
            Sweep(client, trials(code, 1, 2, 3), options, interrupt).run()
        before = {job.id for job in client.jobs()}
        # When it runs again
        jobs = Sweep(client, trials(code, 1, 2, 3), options, lambda _: most.append(
            sum(not job.over for job in client.jobs()))).run()  # fmt: skip

    # Then each job was submitted once
    assert 1 <= len(before) <= 3
    assert before <= {job.id for job in jobs}
    assert len(client.jobs()) == len(jobs) == 3
    assert max(most) <= 2
    # And not with code that was edited meanwhile
    (code / "train.py").write_text("class Digits: pass")
    with pytest.raises(Conflict, match=r"has run args\.lr=1 with another job file or other code"):
        Sweep(client, trials(code, 1, 2, 3), options).run()


def test_a_sweep_survives_a_restart_of_the_api(api: Api, client: Client, code: Path) -> None:
    ended, killed = threading.Event(), threading.Event()

    def report(line: str) -> None:
        if "succeeded" in line:
            ended.set()
            assert killed.wait(PATIENCE)

    sweep = Sweep(client, trials(code, 1, 2, 3), SweepOptions("s", at_once=1), report)
    with training(api), ThreadPoolExecutor(1) as pool:
        jobs = pool.submit(sweep.run)
        assert ended.wait(PATIENCE)
        api.kill()
        killed.set()
        api.start()
        assert [job.state for job in jobs.result(PATIENCE)] == ["succeeded"] * 3


def test_a_sweep_goes_on_without_jobs_that_are_deleted(
    api: Api, client: Client, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "COST_SECONDS", 0.0)
    lines = list[str]()

    def report(line: str) -> None:
        lines.append(line)
        if line.endswith("args.lr=2") or "succeeded" in line:
            job = client.job(line.split()[0])
            if not job.over:
                job.cancel()
            job.delete()

    options = SweepOptions("s", at_once=1, max_cost_usd=100.0)
    with training(api):
        jobs = Sweep(client, trials(code, 1, 2, 3), options, report).run()

    assert [job.spec.args["lr"] for job in jobs] == [1, 3]
    assert sum("was deleted" in line for line in lines) == 1


def test_a_budget_ends_a_sweep(api: Api, client: Client, code: Path) -> None:
    options, lines = SweepOptions("s", at_once=2, max_cost_usd=0.0), list[str]()

    jobs = Sweep(client, trials(code, 1, 2, 3), options, lines.append).run()

    assert [job.state for job in jobs] == ["cancelled", "cancelled"]
    assert "the budget is used up" in lines[-1]


@pytest.mark.parametrize("seconds", [sweeps.COST_SECONDS, 0.0])
def test_a_sweep_with_a_budget_asks_rarely_what_its_jobs_cost(
    api: Api, client: Client, code: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, seconds: float,
) -> None:  # fmt: skip
    monkeypatch.setattr(sweeps, "COST_SECONDS", seconds)
    caplog.set_level("INFO", "httpx")
    options = SweepOptions("s", at_once=1, max_cost_usd=1.0)

    with training(api):
        jobs = Sweep(client, trials(code, 1, 2, 3, 4), options).run()

    asked = Counter(
        job.id for job in jobs for line in caplog.messages if f"/{job.id}/cost " in line
    )
    if seconds:
        assert asked.total() == 1
    else:
        assert 1 < asked[jobs[0].id] < asked.total() / 2, "what an ended job cost is final"


def test_the_commands_print_a_table_and_json(api: Api, code: Path) -> None:
    with training(api):
        printed = run(api, "sweep", code / "job.yaml", "--over", "args.lr=2,1", "--yes")
    assert printed.exit_code == 0, printed.output
    heading, *rows = (line.split() for line in printed.stdout.splitlines())
    assert heading == ["JOB", "STATE", "BEST", "LR", "SAMPLES", "TOOK", "USD"]
    assert [row[4] for row in rows] == ["1", "2"]
    names = [row[0] for row in rows]
    found = json.loads(run(api, "compare", *names, "--json").stdout)
    assert [row["job"] for row in found] == names
    assert found[0]["differences"] == {"args.lr": 1}


def test_a_sweep_with_a_failed_job_says_why_and_exits_with_1(api: Api, code: Path) -> None:
    def fail() -> None:
        await_truth(api.jobs.active)
        api.finish(*api.jobs.active(), to=JobState.FAILED)

    with ThreadPoolExecutor() as executor:
        failing = executor.submit(fail)
        result = run(api, "sweep", code / "job.yaml", "--over", "args.lr=2", "--yes")
        failing.result()

    assert result.exit_code == 1
    assert result.stderr.endswith(" failed: it failed\n")
