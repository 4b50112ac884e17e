"""The examples as jobs: learners, encodings and blending are real, the machines are made up.

Each is cut to a size that trains in seconds, and has to reach the figure that stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vcasgd.fleet.presence import always
from vcasgd.learning.layout import Layout
from vcasgd.simulation.job import Conditions, Outcome, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.task.task import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread; batches this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(name: str, *, epochs: int, **args: Any) -> Outcome:
    """Train with three workers and evaluate at the end."""
    job = JobSpec.load(EXAMPLES / name / "job.yaml")
    job = job.model_copy(update={"epochs": epochs, "args": {**job.args, **args}})
    make_task = partial(load_task, job.task, job.args, Path(job.working_dir))
    conditions = Conditions(always(3))
    return Simulation(job, make_task, conditions, evaluate_every=epochs).run()


def test_a_network_learns_digits() -> None:
    (point,) = trained("digits", epochs=6).points

    assert point.metrics["accuracy"] >= 0.955


def test_a_support_vector_machine_learns_digits() -> None:
    (point,) = trained("svm", epochs=4).points

    assert point.metrics["accuracy"] >= 0.92
    assert point.metrics["loss"] <= 0.5


def test_an_embedding_learns_digits_from_the_rows_that_were_touched() -> None:
    outcome = trained("embeddings", epochs=3, width=16)

    (point,) = outcome.points
    assert point.metrics["accuracy"] >= 0.80
    # 112 · 17² rows of 16 numbers, a bias, and the output layer.
    task = load_task("train:PixelPairs", {"width": 16}, EXAMPLES / "embeddings")
    size = 4 * Layout.of(task.model()).floats
    assert size > 4 * 112 * 17**2 * 16
    assert outcome.bytes_pushed / outcome.updates < size / 8


@pytest.mark.extended
def test_a_transformer_learns_to_spell() -> None:
    (point,) = trained("text", epochs=3).points

    # An alphabet of 96 characters: 4.56 is the loss of a uniform guess.
    assert point.metrics["loss"] <= 2.95


def test_a_text_may_have_any_characters(tmp_path: Path) -> None:
    file = tmp_path / "any.txt"
    file.write_text("naïve\tcafé\n" * 40, encoding="utf-8")

    task = load_task("train:Text", {"data": str(file), "context": 8}, EXAMPLES / "text")

    windows = torch.stack([task.dataset("train")[nth] for nth in range(3)])
    assert windows.shape == (3, 9)
    # The blank, second in the alphabet, replaces all characters that aren't in it.
    assert windows[0].tolist()[2] == windows[0].tolist()[5] == 1
    assert 0 in windows.tolist()[1]
