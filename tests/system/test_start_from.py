"""Jobs that start with the weights of another job, or of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import Harness
from support.waiting import await_truth

from vcasgd.errors import SpecError
from vcasgd.learning.layout import Layout
from vcasgd.spec.sections import StartFrom
from vcasgd.storage.objects import Storage
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.worker.setup import starting_vectors


def run(harness: Harness, to: JobState, **fields: Any) -> JobRecord:
    job = harness.submit_audit(samples=20, subtasks=2, **fields)
    harness.start_workers(job, 1)
    await_truth(lambda: harness.jobs.get(job).state is to)
    return harness.jobs.get(job)


def counts(harness: Harness, job: JobRecord, folder: Path) -> Path:
    """Return the file of a job's last model, whose every weight is the number of its epochs."""
    file = folder / "model.safetensors"
    file.write_bytes(harness.storage.get(f"jobs/{job.id}/checkpoints/{job.model}"))
    return file


@pytest.mark.ci
def test_a_job_starts_with_the_weights_of_another_one(harness: Harness, tmp_path: Path) -> None:
    harness.start_server()
    harness.start_job_loop()
    first = run(harness, JobState.SUCCEEDED, epochs=2)

    source = {"job": first.id, "checkpoint": first.model}
    second = run(harness, JobState.SUCCEEDED, epochs=1, start_from=source)

    tensors = load_file(counts(harness, second, tmp_path))
    assert torch.equal(tensors["count"], torch.full_like(tensors["count"], 3.0))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"weight": torch.ones(1, 2)}, "has no bias, which the model trains"),
        (
            {"weight": torch.ones(2), "bias": torch.ones(1)},
            r"doesn't fit the model: weight has sha",
        ),
        (
            {"weight": torch.ones(1, 2), "bias": torch.ones(1), "head": torch.ones(1)},
            "has head, and the model doesn't",
        ),
        (None, "can't be read: .*weights.safetensors"),
    ],
    ids=["missing", "shape", "extra", "no file"],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor] | None, problem: str
) -> None:
    layout = Layout.of(torch.nn.Linear(2, 1))
    if tensors is not None:
        save_file(tensors, tmp_path / "weights.safetensors")
    source = StartFrom(file="weights.safetensors")

    with pytest.raises(SpecError, match=f"start_from: weights.safetensors {problem}"):
        starting_vectors(source, layout, Storage(f"file://{tmp_path}"), tmp_path)
