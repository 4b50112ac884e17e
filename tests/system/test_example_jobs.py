"""The examples as jobs: learners, encodings and blending are real, the machines are made up.

Each is cut to a size that trains in seconds, and has to reach the figure that stands here. They
read their data in every documented format.
"""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.batches import batches

from vcasgd.fleet.histories import always
from vcasgd.learning.layout import Layout
from vcasgd.simulation.job import Conditions, Outcome, Simulation
from vcasgd.spec.job import JobSpec
from vcasgd.spec.update import RoundsSpec, Update, VcAsgdSpec
from vcasgd.task.task import Task, load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


pytestmark = pytest.mark.usefixtures("one_thread")


def task_of(name: str, **args: Any) -> Task:
    job = JobSpec.load(EXAMPLES / name / "job.yaml")
    return load_task(job.task, {**job.args, **args}, Path(job.working_dir))


def trained(name: str, *, epochs: int, update: Update | None = None, **args: Any) -> Outcome:
    job = JobSpec.load(EXAMPLES / name / "job.yaml")
    changes = {"epochs": epochs, "update": update or job.update, "args": {**job.args, **args}}
    job = job.model_copy(update=changes)
    make_task = partial(load_task, job.task, job.args, Path(job.working_dir))
    conditions = Conditions(always(3))
    return Simulation(job, make_task, conditions, evaluate_every=epochs).run()


@pytest.mark.parametrize(
    "update",
    [
        pytest.param(RoundsSpec(), id="rounds"),
        pytest.param(VcAsgdSpec(), id="vc-asgd", marks=pytest.mark.extended),
    ],
)
@pytest.mark.ci
def test_a_network_learns_digits(update: Update) -> None:
    (point,) = trained("digits", epochs=6, update=update).points

    assert point.metrics["accuracy"] >= 0.955


@pytest.mark.ci
def test_a_support_vector_machine_learns_digits() -> None:
    (point,) = trained("svm", epochs=4).points

    assert point.metrics["accuracy"] >= 0.92
    assert point.metrics["loss"] <= 0.5


@pytest.mark.ci
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


def test_the_split_of_digits_is_reproducible() -> None:
    first, second = (task_of("digits").dataset("validation") for _ in range(2))

    assert len(first) == 360
    assert torch.equal(first[:][0], second[:][0])


@pytest.fixture(scope="module")
def arrays() -> dict[str, NDArray[np.uint8]]:
    numbers = np.random.default_rng(0)
    shapes = {"x_train": (6, 28, 28), "y_train": (6,), "x_test": (4, 28, 28), "y_test": (4,)}
    return {name: numbers.integers(0, 10, shape, np.uint8) for name, shape in shapes.items()}


def mnist(data: Path) -> Task:
    return task_of("mnist", data=str(data))


def idx(array: NDArray[np.uint8]) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + lengths + array.tobytes()


@pytest.mark.parametrize("form", ["npz", "ubyte", "gz"])
def test_mnist_reads_every_format(
    tmp_path: Path, arrays: dict[str, NDArray[np.uint8]], form: str
) -> None:
    data = tmp_path
    if form == "npz":
        data = tmp_path / "mnist.npz"
        np.savez_compressed(data, allow_pickle=False, **arrays)
    else:
        (tmp_path / "MNIST" / "raw").mkdir(parents=True)
        names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        for name, array in zip(names, arrays.values(), strict=True):
            file = tmp_path / "MNIST" / "raw" / f"{name}-ubyte"
            packed = gzip.compress(idx(array))
            file.write_bytes(idx(array)) if form == "ubyte" else Path(f"{file}.gz").write_bytes(
                packed
            )
    task = mnist(data)

    [(train_batch, count)] = batches(task, task.dataset("train"), np.array([5, 0]))
    [(test_batch, _)] = batches(task, task.dataset("validation"), np.arange(4))

    assert count == 2
    assert train_batch[1].tolist() == arrays["y_train"][[5, 0]].tolist()
    assert test_batch[1].tolist() == arrays["y_test"].tolist()
    pixels = (arrays["x_test"] / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(test_batch[0].squeeze(1).numpy(), pixels, atol=1e-6)


def test_missing_data_shows_the_download_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"curl .*data/mnist\.npz"):
        mnist(tmp_path / "nowhere").dataset("train")
