"""A worker with several processes trains as one, and survives the loss of any of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.waiting import PATIENCE

from vcasgd.errors import RankLost, UserCodeError
from vcasgd.session.script import load
from vcasgd.spec.job import JobSpec
from vcasgd.worker.gpus import OwnGpu
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.ranked_learner import LeadingLearner
from vcasgd.worker.ranks import Ranks

TASKS = Path(__file__).parents[1] / "support" / "tasks"


@contextmanager
def learner_of(
    ranks: int, task: str = "ranked:Ranked", timeout: float = PATIENCE, **args: Any
) -> Iterator[Learner]:
    """Yield a learner with so many processes, whose optimizer lasts for the job."""
    spec = JobSpec.parse({"name": "job", "task": task, "epochs": 4, "subtasks_per_epoch": 2})
    loaded = load(task, args, TASKS)
    if ranks == 1:
        learner = Learner(spec, loaded, "cpu")
    else:
        given = spec.model_copy(update={"args": args})
        processes = Ranks(ranks, given, TASKS, OwnGpu(), timeout, first_timeout=timeout)
        learner = LeadingLearner(spec, loaded, "cpu", processes)
    learner.check_against(learner.facts(1))
    learner.start_subtask()
    try:
        yield learner
    finally:
        learner.close()


def interval(learner: Learner, base: Base, subtask: int) -> Trained:
    assert learner.member is not None
    learner.member.assign(12)
    stop = learner.plan.size(subtask)
    return learner.train(base, subtask, 0, stop, should_stop=lambda: False, on_step=lambda: None)


def trained_by(learner: Learner, intervals: int = 3) -> list[Trained]:
    floats, integers = learner.initial()
    done = []
    for subtask in range(intervals):
        done.append(interval(learner, Base(floats, integers), subtask))
        floats = floats + done[-1].update
    return done


@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [
        (2, "adamw"),
        *(pytest.param(*each, marks=pytest.mark.extended) for each in [(2, "sgd"), (4, "adamw")]),
    ],
)
def test_ranks_train_what_one_process_trains(ranks: int, optimizer: str) -> None:
    with learner_of(1, optimizer=optimizer) as one, learner_of(ranks, optimizer=optimizer) as many:
        for alone, together in zip(trained_by(one), trained_by(many), strict=True):
            assert (together.stop, together.steps) == (alone.stop, alone.steps)
            assert together.loss_sum == pytest.approx(alone.loss_sum, rel=1e-5)
            torch.testing.assert_close(together.update, alone.update, rtol=1e-4, atol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("own_steps", [False, True], ids=["session", "loop"])
def test_scripts_train_as_in_one_process(own_steps: bool) -> None:
    args = {"own_steps": own_steps}
    with (
        learner_of(1, "ranked_loop.py", **args) as one,
        learner_of(2, "ranked_loop.py", **args) as many,
    ):
        for alone, together in zip(trained_by(one), trained_by(many), strict=True):
            assert together.loss_sum == pytest.approx(alone.loss_sum, rel=1e-5)
            torch.testing.assert_close(together.update, alone.update, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", ["killed", pytest.param("hangs", marks=pytest.mark.extended)])
def test_a_lost_rank_costs_the_interval_only(fault: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    args = {"fault": fault, "marker": str(marker)}
    with learner_of(2, timeout=15 if fault == "hangs" else PATIENCE, **args) as learner:
        floats, integers = learner.initial()
        with pytest.raises(RankLost, match="signal 9" if fault == "killed" else "in time"):
            interval(learner, Base(floats, integers), 0)

        trained = interval(learner, Base(floats, integers), 0)

    assert not marker.exists()
    assert trained.stop == learner.plan.size(0)


@pytest.mark.extended
def test_an_error_of_a_rank_is_that_of_the_worker(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    with learner_of(2, fault="raises", marker=str(marker)) as learner:
        floats, integers = learner.initial()
        with pytest.raises(UserCodeError, match="this rank has a fault"):
            interval(learner, Base(floats, integers), 0)
