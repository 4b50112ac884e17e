"""The base of a model stays on each machine: only what trains is fetched, pushed, and stored."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.harness import Harness
from support.training import TASKS
from support.waiting import await_truth

from vcasgd.store.ledger.job import JobState


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "frozen", "trained"),
    [
        pytest.param("plain_lora:PlainLora", 26_000_001, 10_002, id="quantized, by hand"),
        pytest.param(
            *("lora:Lora", 124_439_808, 294_912),
            id="PEFT on transformers",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_lora_on_a_large_network_fetches_the_adapter(
    harness: Harness, task: str, frozen: int, trained: int
) -> None:
    if task.startswith("lora"):
        pytest.importorskip("peft", reason="needs the extra peft")
    harness.start_server()
    job = harness.submit(
        TASKS, task=task, epochs=2, subtasks_per_epoch=2, update={"rule": "async-local-sgd"}
    )
    # Given two workers, each of which builds the base itself, and no controller that ends the job
    # and removes its tensors
    harness.start_workers(job, 2)
    harness.start_job_when_ready(job)
    await_truth(lambda: harness.applied(job), 600)

    layout = harness.layout(job)
    assert sum(each.size for each in layout.base) == frozen
    assert layout.floats == trained
    store, connection = harness.snapshots(job), harness.tensors.connection
    vector, before = torch.empty(layout.floats), connection.bulk_received
    store.fetch_rounded(vector)
    fetched = connection.bulk_received - before

    # Then it is as large as the adapter, and so is the stored model
    adapter = 4 * trained
    assert 0 < fetched <= 1.1 * adapter, f"{fetched} bytes, and the adapter has {adapter}"
    harness.start_job_loop()
    await_truth(lambda: harness.jobs.get(job).state is JobState.SUCCEEDED, 600)
    done = harness.jobs.get(job)
    stored = load_file(harness.home / "storage" / "jobs" / job / "checkpoints" / done.model)
    assert sum(each.numel() for each in stored.values()) == trained

    assert done.totals["repeated"] == 0
    assert len(done.evaluations) == 2
