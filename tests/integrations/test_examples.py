"""The examples of all integrations learn with two workers, although workers are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import Harness
from support.waiting import await_truth

from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import JobState

#: Seconds for a whole example on a busy machine.
EXAMPLE_SECONDS = 600
EXAMPLES = Path(__file__).parents[2] / "examples"
#: Libraries that examples of other names need.
LIBRARIES = {"huggingface": "transformers", "sft": "trl"}


@pytest.fixture
def folder(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an example's folder; trainers use one thread, and write elsewhere."""
    pytest.importorskip(LIBRARIES.get(example, example), reason="needs its library")
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield EXAMPLES / example
    torch.set_num_threads(before)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "samples", "epochs", "args", "bounds"),
    [
        ("accelerate", 1437, 20, {"epochs": 20, "accumulate": 1}, {"accuracy": 0.93}),
        ("accelerate", 1437, 20, {"epochs": 20, "accumulate": 2}, {"accuracy": 0.93}),
        ("huggingface", 824, 12, {"epochs": 12}, {"accuracy": 0.95}),
        ("lightning", 1437, 20, {}, {"accuracy": 0.93}),
        ("sft", 256, 10, {}, {"loss": 0.3}),
    ],
)
def test_the_example_learns_although_two_workers_are_killed(
    harness: Harness,
    folder: Path,
    samples: int,
    epochs: int,
    args: dict[str, Any],
    bounds: dict[str, float],
) -> None:
    spec = JobSpec.load(folder / "job.yaml").model_copy(update={"epochs": epochs, "args": args})
    harness.start_server()
    harness.start_job_loop()
    job = harness.submit(folder, **spec.model_dump(mode="json", exclude={"name", "working_dir"}))
    # One worker after the other is killed and replaced, the second one three epochs later.
    for nth, killed in enumerate(harness.start_workers(job, 2)):
        await_truth(lambda nth=nth: harness.applied(job) > samples * (1 + 3 * nth))
        harness.workers[killed].kill()
        harness.start_worker(job)
    await_truth(lambda: harness.jobs.get(job).state is JobState.SUCCEEDED, EXAMPLE_SECONDS)

    done = harness.jobs.get(job)
    assert (done.totals["samples"], done.totals["repeated"]) == (epochs * samples, 0)
    assert done.best is not None
    assert done.best.metrics.get("accuracy", 1.0) >= bounds.get("accuracy", 0.0)
    assert done.best.metrics["loss"] < bounds.get("loss", float("inf"))
