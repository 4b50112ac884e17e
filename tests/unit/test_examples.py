"""The examples train with VC-ASGD, and read their data in every documented format."""

from __future__ import annotations

import gzip
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vcasgd.errors import TaskImportError
from vcasgd.learning.applied_record import AppliedRecord
from vcasgd.learning.layout import Layout
from vcasgd.learning.length import plan_for
from vcasgd.learning.rules import Context, make_rule, merge_integers
from vcasgd.learning.training import batches, build, evaluate, seed_for, train
from vcasgd.learning.vector import gather, scatter
from vcasgd.spec.job import JobSpec
from vcasgd.spec.update import VcAsgdSpec
from vcasgd.task.task import Task, load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


def task_of(job: JobSpec, **args: object) -> Task:
    return load_task(job.task, {**job.args, **args}, Path(job.working_dir))


def never() -> bool:
    return False


def nothing() -> None:
    pass


def accuracy_of_alternating_workers(job: JobSpec, task: Task, workers: int) -> float:
    """Train with VC-ASGD in one process. After the start, staleness is ``workers − 1``."""
    data = task.dataset("train")
    plan = plan_for(job, len(data), task.batch_size)  # type: ignore[arg-type]
    model, rule, record = build(task, job.seed, "cpu"), make_rule(job.update), AppliedRecord(plan)
    layout = Layout.of(model)
    floats, integers = torch.empty(layout.floats), torch.empty(layout.integers, dtype=torch.int64)
    gather(model, layout, floats, integers)
    local, counters = floats.clone(), integers.clone()
    bases = deque([(0, floats.clone())] * workers)
    for subtask in range(plan.total_subtasks):
        base_version, base = bases.popleft()
        scatter(base, integers, model, layout)
        torch.manual_seed(seed_for(job.seed, subtask, 0))
        samples = plan.indices(subtask, 0, plan.size(subtask))
        interval = train(
            task,
            model,
            task.optimizer(model.parameters()),
            batches(task, data, samples),
            "cpu",
            should_stop=never,
            on_step=nothing,
        )
        gather(model, layout, local, counters)
        epoch = plan.epoch_of(subtask) + 1
        rule.blend(floats, local, Context(subtask - base_version, epoch, layout.parameters))
        merge_integers(integers, counters)
        record.advance(subtask, 0, interval.samples)
        bases.append((subtask + 1, floats.clone()))
    assert record.complete
    scatter(floats, integers, model, layout)
    validation = task.dataset("validation")
    return evaluate(task, model, validation, "cpu", should_stop=never, on_step=nothing)["accuracy"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: several are slower for such small batches."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_three_workers_learn_digits() -> None:
    changes = {"epochs": 6, "subtasks_per_epoch": 15, "update": VcAsgdSpec()}
    job = JobSpec.load(EXAMPLES / "digits" / "job.yaml").model_copy(update=changes)

    assert accuracy_of_alternating_workers(job, task_of(job), workers=3) >= 0.955


def test_the_split_of_digits_is_reproducible() -> None:
    job = JobSpec.load(EXAMPLES / "digits" / "job.yaml")
    first, second = (task_of(job).dataset("validation") for _ in range(2))

    assert len(first) == 360  # type: ignore[arg-type]
    assert torch.equal(first[:][0], second[:][0])


@pytest.fixture(scope="module")
def arrays() -> dict[str, NDArray[np.uint8]]:
    numbers = np.random.default_rng(0)
    shapes = {"x_train": (6, 28, 28), "y_train": (6,), "x_test": (4, 28, 28), "y_test": (4,)}
    return {name: numbers.integers(0, 10, shape, np.uint8) for name, shape in shapes.items()}


def mnist(data: Path) -> Task:
    return task_of(JobSpec.load(EXAMPLES / "mnist" / "job.yaml"), data=str(data))


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


def test_arguments_of_the_examples_are_checked() -> None:
    job = JobSpec.load(EXAMPLES / "digits" / "job.yaml")

    with pytest.raises(TaskImportError, match="unexpected keyword argument 'depth'"):
        task_of(job, depth=3)
