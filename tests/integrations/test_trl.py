"""TRL's trainer for supervised fine-tuning as a task."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.examples import finish_although_workers_die
from support.harness import Harness

from vcasgd.fleet.presence import always
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.task.task import load_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft"
#: Questions in an epoch.
SAMPLES = 256


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trainer write there."""
    pytest.importorskip("trl", reason="needs the extra trl")
    monkeypatch.chdir(tmp_path)


def test_only_answers_count() -> None:
    """A question has no labels, as TRL wants it."""
    task = load_task("train:task", {}, EXAMPLE)
    dataset = task.dataset("train")
    batch = task.collate([dataset[0], dataset[1]])

    loss = task.loss(task.model(), batch)

    answer = batch["labels"][0][batch["labels"][0] != -100]
    assert 0 < len(answer) < int(batch["attention_mask"][0].sum())
    assert torch.isfinite(loss)
    assert len(dataset) == SAMPLES


@pytest.mark.extended
@pytest.mark.slow
def test_two_workers_learn_the_answers() -> None:
    job = JobSpec.load(EXAMPLE / "job.yaml")
    make_task = partial(load_task, job.task, job.args, EXAMPLE)

    (point,) = Simulation(job, make_task, Conditions(always(2)), evaluate_every=10).run().points

    assert point.metrics["loss"] < 0.3


@pytest.mark.extended
@pytest.mark.slow
def test_the_answers_are_learned_although_two_workers_are_killed(harness: Harness) -> None:
    done = finish_although_workers_die(harness, EXAMPLE, samples=SAMPLES, epochs=10)
    assert done.best is not None
    assert done.best.metrics["loss"] < 0.3
