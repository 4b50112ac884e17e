"""The base of a model stays on each machine: only what trains is fetched, pushed, and stored."""

from __future__ import annotations

from pathlib import Path

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
        pytest.param("plain_lora:PlainLora", 104_000_001, 20_002, id="quantized, by hand"),
        pytest.param(
            *("lora:Lora", 124_439_808, 294_912),
            id="PEFT on transformers",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_lora_on_a_network_of_100_million_parameters_fetches_the_adapter(
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

    # When a snapshot is fetched
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
    assert done.model is not None
    stored = load_file(harness.home / "storage" / "jobs" / job / "checkpoints" / done.model)
    assert sum(each.numel() for each in stored.values()) == trained

    # and both workers have trained and evaluated it
    assert done.totals["repeated"] == 0
    assert len(done.evaluations) == 2


@pytest.mark.extended
def test_a_machine_with_another_base_is_quarantined_and_the_tensor_is_named(
    harness: Harness, tmp_path: Path
) -> None:
    # Given a job whose base depends on the machine
    (tmp_path / "task.py").write_text(
        "import os, time, torch, vcasgd\n"
        "class Machine(vcasgd.Task):\n"
        "    def model(self):\n"
        "        model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Linear(3, 1))\n"
        "        model[0].requires_grad_(False)\n"
        "        with torch.no_grad():\n"
        "            model[0].bias.fill_(float(os.environ['MACHINE']))\n"
        "        return model\n"
        "    def dataset(self, split):\n"
        "        return [torch.ones(1)] * 8\n"
        "    def loss(self, model, batch):\n"
        "        time.sleep(0.02)\n"
        "        return model(batch).mean()\n"
        "    def evaluate(self, model, batch):\n"
        "        return {'loss': model(batch).sum(), 'count': torch.tensor(len(batch))}\n"
    )
    harness.start_server()
    harness.start_job_loop()
    job = harness.submit(tmp_path, task="task:Machine", epochs=10_000, subtasks_per_epoch=4)
    harness.start_worker(job, fresh_env={"MACHINE": "1"})
    await_truth(lambda: harness.jobs.get(job).facts)

    # When a worker on another machine builds another one
    harness.start_worker(job, fresh_env={"MACHINE": "2"})

    # Then it is quarantined, with the first tensor that differs, and the job continues
    (event,) = await_truth(lambda: harness.events(job, "worker-quarantined"))
    assert "0.bias of the base model has other values on this machine" in event["text"]
    assert harness.jobs.get(job).state is JobState.RUNNING
