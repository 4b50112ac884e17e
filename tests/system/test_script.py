"""A script as the task of a job has the leases, pushes, and guarantees of a class."""

from __future__ import annotations

import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.harness import Harness
from support.training import Training

from vcasgd.errors import NonFiniteLoss, SpecError, TaskImportError, UserCodeError
from vcasgd.learning.precision import MAX_SKIPPED
from vcasgd.learning.training import batch_size_of
from vcasgd.session.script import ScriptTask, load
from vcasgd.spec.job import JobSpec
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner

HEAD = """
import sys
import torch
import vcasgd

model = torch.nn.Linear(1, 1, bias=False)
session = vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=1.0))
data = [torch.ones(1)] * 8

@session.evaluation(data)
def judge(model, batch):
    return {"loss": model(batch).sum(), "count": torch.tensor(len(batch))}

"""
#: Each step subtracts 1 from the only weight.
LOOP = """
for batch in session.batches(data, batch_size=2):
    session.step(model(batch).mean())
"""


#: The same with steps of its own.
OWN_LOOP = """
optimizer = session._optimizer
for batch in session.loader(data, batch_size=2):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
"""


# --- on real servers -------------------------------------------------------------------


@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["short leases"])
@pytest.mark.parametrize(
    "script", ["counting.py", pytest.param("accumulating.py", marks=pytest.mark.ci)]
)
def test_workers_that_run_a_script_are_killed_and_every_sample_counts_once(
    harness: Harness, script: str
) -> None:
    # Given a job whose task is a script, on two workers
    # Each of its subtasks has four push intervals.
    training = Training(harness, task=script, samples=640, subtasks=8, step_seconds=0.1)
    killed, _ = training.start(2)
    harness.start_job_loop()

    training.freeze_mid_interval(killed)
    training.worker(killed).kill()

    # Then a third one resumes its work, and each sample of each epoch counts exactly once
    training.add_workers(1)
    job = training.await_success()
    assert 0 < training.repeated_samples() <= training.most_repeated_samples()

    assert job.totals["logged"]["samples"][0] == job.totals["samples"]

    assert job.evaluations[-1].metrics["applied"] == 2.0


# --- in this process, without a network ------------------------------------------------


class Scripts:
    """Writes scripts and ends the running ones."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tasks: list[ScriptTask] = []

    def task(self, code: str, **args: object) -> ScriptTask:
        (self._directory / "train.py").write_text(textwrap.dedent(code))
        task = load("train.py", dict(args), self._directory)
        self._tasks.append(task)
        return task

    def learner(self, code: str, **args: object) -> Learner:
        spec = {"name": "job", "task": "train.py", "epochs": 2, "subtasks_per_epoch": 2}
        update = {"rule": "async-local-sgd"}
        return Learner(JobSpec.parse({**spec, "update": update}), self.task(code, **args), "cpu")

    def end(self) -> None:
        for task in self._tasks:
            task.close()
            assert task.ended or not task._thread


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    scripts = Scripts(tmp_path)
    yield scripts
    scripts.end()


def interval(learner: Learner, weight: float = 10.0, stop: int = 4) -> float:
    """Train ``stop / 2`` local steps from a snapshot with this weight; return the result."""
    base = Base(torch.tensor([weight]), torch.empty(0, dtype=torch.int64))
    learner.start_subtask()
    trained = learner.train(base, 0, 0, stop)
    return float(trained.update)


def test_a_worker_that_is_asked_to_leave_ends_the_script_in_its_loop(harness: Harness) -> None:
    # Given a worker in the middle of a subtask that it pushes only at its end
    training = Training(
        harness, task="counting.py", samples=300, epochs=1, subtasks=1, push_every="subtask"
    )
    (leaver,) = training.start(1)
    training.await_steps(leaver, 20)

    assert training.worker(leaver).terminate() == 0

    assert len(training.steps_of(leaver)) >= 20
    assert "the end:" not in (harness.home / f"{leaver}.log").read_text()


def test_intervals_are_the_steps_of_the_scripts_own_loop(scripts: Scripts) -> None:
    learner = scripts.learner(HEAD + LOOP)

    assert (learner.plan.samples, learner.interval_stop(0, 0)) == (8, 4)
    assert [interval(learner), interval(learner, 20.0)] == [-2, -2]


@pytest.mark.parametrize("loop", [LOOP, OWN_LOOP], ids=["session.step", "own steps"])
def test_rates_follow_the_schedule_and_gradients_are_clipped(scripts: Scripts, loop: str) -> None:
    clipped = HEAD.replace("lr=1.0)", "lr=1.0), schedule=lambda at: 1 - at, clip_norm=0.5")
    learner = scripts.learner(clipped + loop)

    # Half a step at the start, then half of 1 − 2/16 of a step.
    assert [interval(learner), interval(learner, 20.0)] == [-(0.5 + 0.5 * 14 / 16)] * 2


def test_the_scripts_own_scheduler_is_sampled(scripts: Scripts) -> None:
    # Given a scheduler with warm-up in the first of 4 steps, of the 8 that one worker would make
    scheduler = (
        "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n"
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: (0.25, 1)[n > 0])\n"
        "session = vcasgd.Session(model, optimizer, scheduler, schedule_steps=4)\n"
    )
    first, last = HEAD.split("session = ")
    code = f"{first}{scheduler}{last.split(chr(10), 1)[1]}{OWN_LOOP}    scheduler.step()\n"

    # Then a step has the rate of its progress, whatever the worker's own steps were
    learner = scripts.learner(code)
    assert [interval(learner), interval(learner)] == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("pass", UserCodeError, r"a batch ended without optimizer\.step"),
        ("optimizer.step()", UserCodeError, r"no loss, because neither loss\.backward nor"),
        (
            "model(batch).mean().backward(); optimizer.step(); optimizer.step()",
            UserCodeError,
            "step was called twice for one batch",
        ),
        (
            "optimizer.param_groups[0]['lr'] = 3; model(batch).mean().backward(); optimizer.step()",
            UserCodeError,
            "changed the learning rate, which a job sets",
        ),
        (
            "(model(batch).mean() / 0).backward(); optimizer.step()",
            NonFiniteLoss,
            "the loss is inf in local step 1",
        ),
    ],
)
def test_an_error_in_a_loop_with_its_own_steps_is_reported(
    scripts: Scripts, body: str, error: type[Exception], message: str
) -> None:
    head, _ = OWN_LOOP.split("    ", 1)
    learner = scripts.learner(f"{HEAD}{head}    {body}\n")

    with pytest.raises(error, match=message):
        interval(learner)


#: Steps of 8 samples in batches of 2, whose gradients are scaled.
ACCUMULATING = """
optimizer = session._optimizer
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
loader = session.loader(data, batch_size=2, gradient_accumulation_steps=4)
seen = []
for batch in loader:
    seen.append(len(batch))
    scaler.scale(model(batch).mean() / 4).backward()
    if loader.ends_step:
        print(seen, loader.ends_step, flush=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("stop", "seen"), [(4, [2, 2]), (3, [3]), (1, [1])])
def test_a_step_has_the_mean_gradient_of_its_batches(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], stop: int, seen: list[int]
) -> None:
    # Given a loop that makes a step for 8 samples, in batches of at most 2
    learner = scripts.learner(HEAD + ACCUMULATING.replace("SCALE", "64.0"))
    assert learner.plan.samples == 8
    assert batch_size_of(learner.task) == 8

    # When an interval has fewer samples, then it is a single step of fewer batches
    assert interval(learner, 10.0, stop) == -1
    assert capsys.readouterr().out.splitlines() == [f"{seen} True"]


def test_the_loss_of_a_step_is_the_mean_of_its_batches(scripts: Scripts) -> None:
    learner = scripts.learner(HEAD + ACCUMULATING.replace("SCALE", "64.0"))
    base = Base(torch.tensor([3.0]), torch.empty(0, dtype=torch.int64))
    learner.start_subtask()
    trained = learner.train(base, 0, 0, 4)
    assert (trained.stop, trained.steps, trained.loss_sum) == (4, 1, 12.0)


#: Its gradient is 16, so it overflows with a scale of 2¹²⁵ until the scale is halved twice.
OVERFLOWING = (HEAD.replace("[torch.ones(1)]", "[16 * torch.ones(1)]") + ACCUMULATING).replace(
    "SCALE", "2.0**125"
)


@pytest.mark.parametrize("options", ["", ", fused=True"])
def test_a_step_that_the_scaler_skips_counts_as_trained(scripts: Scripts, options: str) -> None:
    # Given an optimizer that skips a step itself if it is fused, and gradients that are clipped
    clipped = f"lr=1.0{options}), clip_norm=8.0"
    learner = scripts.learner(OVERFLOWING.replace("lr=1.0)", clipped))

    # Then the first two steps change nothing, and the third one is made
    changes = [interval(learner) for _ in range(3)]
    assert changes == pytest.approx([0, 0, -8])


def test_a_scaler_that_skips_every_step_is_a_divergence(scripts: Scripts) -> None:
    # Given a finite loss whose gradient is infinite
    root = ACCUMULATING.replace("model(batch)", "(model(batch) - 10).sqrt()")
    learner = scripts.learner(HEAD + root.replace("SCALE", "2.0"))

    for _ in range(MAX_SKIPPED):
        assert interval(learner) == 0
    with pytest.raises(NonFiniteLoss, match=f"skipped {MAX_SKIPPED + 1} steps in a row"):
        interval(learner)


@pytest.mark.parametrize("processes", [0, 1])
def test_batches_of_an_evaluation_are_not_cut(scripts: Scripts, processes: int) -> None:
    loader = f"torch.utils.data.DataLoader(data, 2, num_workers={processes})"
    code = (HEAD + ACCUMULATING).replace("loader(data, batch_size=2,", f"loader({loader},")
    learner = scripts.learner(code.replace("SCALE", "2.0"))
    assert interval(learner) == -1

    floats, integers = torch.tensor([3.0]), torch.empty(0, dtype=torch.int64)
    judged = learner.evaluate(floats, integers)
    learner.close()
    # The sum of one batch of 8
    assert judged == {"loss": 3.0, "count": 8.0}


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("if loader.ends_step:", "if True:", "or before the last batch of a step"),
        ("if loader.ends_step:", "if len(seen) == 4:", "a batch ended without optimizer.step"),
        ("scaler.scale(model(batch).mean() / 4).backward()", "pass", "no loss, because"),
    ],
)
def test_a_loop_that_counts_its_batches_itself_is_refused(
    scripts: Scripts, line: str, instead: str, message: str
) -> None:
    learner = scripts.learner(HEAD + ACCUMULATING.replace(line, instead).replace("SCALE", "2.0"))
    with pytest.raises(UserCodeError, match=message):
        interval(learner)


@pytest.mark.ci
def test_an_accumulating_loop_trains_without_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given an epoch of 3 steps, the last one of 2 batches
    code = OVERFLOWING.replace("* 8", "* 20").replace(
        "for batch in", "before = model.weight.item()\nfor batch in"
    )
    (tmp_path / "train.py").write_text(code + "print(before - model.weight.item())")

    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py")

    # Then only the last one, after two halvings of the scale, changes the weight
    *steps, change = capsys.readouterr().out.splitlines()
    assert steps == [f"{[2] * count} True" for count in (4, 8, 10)]
    assert float(change) == pytest.approx(16 * 2 / 4, rel=1e-4)


def test_the_first_model_is_the_one_before_any_training(scripts: Scripts) -> None:
    learner = scripts.learner(HEAD + "torch.nn.init.constant_(model.weight, 7.0)\n" + LOOP)
    # The session starts before the weights are set; only the start of the loop counts.
    interval(learner)

    assert learner.initial()[0].item() == 7.0


def test_arguments_are_those_of_a_command_line(scripts: Scripts) -> None:
    code = "import sys\nassert sys.argv[1:] == ['--depth', '3', '--amp', '--sizes', '1', '2']\n"
    args = {"depth": 3, "amp": True, "quiet": False, "seed": None, "sizes": [1, 2]}

    scripts.learner(code + HEAD + LOOP, **args)


def test_a_mapping_is_no_argument(scripts: Scripts) -> None:
    with pytest.raises(SpecError, match=r"args\.sizes: a script's arguments are text"):
        scripts.task(HEAD, sizes={"a": 1})


def test_a_script_can_import_modules_beside_it(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "helper_of_script.py").write_text("WIDTH = 1\n")

    scripts.learner("import helper_of_script\n" + HEAD + LOOP)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sklearm", r"train\.py can't be run: ModuleNotFoundError: No module named 'skl"),
        ("raise SystemExit(2)", r"train\.py can't be run: SystemExit: 2"),
        (HEAD, r"train\.py ended without a batch of a vcasgd\.Session"),
        ("import torch", r"name a TrainerTask or a ModuleTask"),
    ],
)
def test_a_script_without_a_first_batch_is_no_task(
    scripts: Scripts, code: str, message: str
) -> None:
    with pytest.raises(TaskImportError, match=message) as caught:
        scripts.learner(code)

    assert caught.value.details["field"] == "task"
    assert "vcasgd/session/script.py" not in caught.value.traceback


def test_an_argument_that_a_script_does_not_have_is_named(scripts: Scripts) -> None:
    code = "from argparse import ArgumentParser\nArgumentParser().parse_args()\n"

    with pytest.raises(
        TaskImportError, match=r"args: train\.py: unrecognized.*: --lrr 4"
    ) as caught:
        scripts.learner(code, lrr=4)

    assert caught.value.details["field"] == "args"


def test_a_script_without_an_evaluation_is_no_task(scripts: Scripts) -> None:
    with pytest.raises(SpecError, match=r"no evaluation \(decorate a function with @session"):
        scripts.learner(HEAD.replace("@session.evaluation(data)", "") + LOOP)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise OSError('no disk')", r"train\.py raised OSError: no disk"),
        ("sys.exit(3)", r"train\.py raised SystemExit: 3"),
        ("break", r"train\.py left the loop over its batches without training one"),
        ("continue", r"a batch ended without session\.step"),
        ("session.step(model(batch).mean()); session.step(0)", "called twice for one batch"),
        ("session.step(model(batch))", r"loss returned shape \[2, 1\]"),
        ("next(session.batches(data))", "began a second loop over its batches"),
        ("vcasgd.Session(model, session._optimizer)", "created a second vcasgd.Session"),
    ],
)
def test_an_error_in_the_loop_is_reported(scripts: Scripts, body: str, message: str) -> None:
    learner = scripts.learner(f"{HEAD}for batch in session.batches(data, 2):\n    {body}\n")

    with pytest.raises(UserCodeError, match=message):
        interval(learner)


def test_a_script_has_ended_after_an_error_in_its_loop(scripts: Scripts) -> None:
    task = scripts.task(f"{HEAD}for batch in session.batches(data, 2):\n    1 / 0\n")
    model = task.model()
    with pytest.raises(UserCodeError, match="division by zero"):
        task.loss(model, torch.ones(2, 1))

    assert task.ended
    # Not that it has left its loop, which would be a success
    with pytest.raises(UserCodeError, match="division by zero"):
        task.loss(model, torch.ones(2, 1))


def test_a_script_continues_after_a_loss_that_is_not_finite(scripts: Scripts) -> None:
    learner = scripts.learner(HEAD + LOOP)
    with pytest.raises(NonFiniteLoss):
        interval(learner, float("inf"))

    assert interval(learner) == -2


def test_two_learners_cannot_share_a_script(scripts: Scripts) -> None:
    task = scripts.task(HEAD + LOOP)
    task.model()

    with pytest.raises(UserCodeError, match="trains one model"):
        task.loss(task.model(), torch.ones(2, 1))


def test_a_waiting_script_can_be_ended(scripts: Scripts, tmp_path: Path) -> None:
    closing = "try:\n    {}\nfinally:\n    open({!r}, 'w').close()\nopen({!r}, 'w').close()\n"
    loop = LOOP.strip().replace("\n", "\n    ")
    reached, behind = tmp_path / "reached", tmp_path / "behind"
    task = scripts.task(HEAD + closing.format(loop, str(reached), str(behind)))
    task.model()

    task.close()

    assert task.ended
    assert reached.exists()
    assert not behind.exists()
