"""The GPU of each learner, with a fake number of GPUs, and what heartbeats tell of its use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpus import on_gpus

import vcasgd
from vcasgd.errors import SpecError
from vcasgd.gpus import VISIBLE
from vcasgd.learning.layout import Layout, TensorEntry, TensorKind
from vcasgd.spec.job import JobSpec, Workers
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.worker.gpus import (
    OwnGpu,
    Throughput,
    choose_gpu,
    flops_per_sample_of,
    ranks_of,
    why_apart,
    why_one_process,
)

CARD = {"uuid": "GPU-a", "name": "NVIDIA H100 80GB HBM3", "total": 80, "free": 60}
AVERAGE = TensorEntry("beside:teacher.weight", (2,), TensorKind.STATISTIC, 0)
LATEST = TensorEntry("0.u", (2,), TensorKind.LATEST_FLOAT, 0)
#: Prints the fields after intervals of 100 samples at seconds 10 and 20.
USE = """
import json
from vcasgd.worker.gpus import OwnGpu, Throughput

times = iter((0.0, 10.0, 20.0))
use = Throughput(OwnGpu(0, 1), lambda: next(times))
for samples in (0, 100, 200):
    fields = use.fields(samples, 989e9)
print(json.dumps(fields))
"""


@pytest.mark.parametrize(
    ("worker", "place"),
    [("j", 0), ("j.m", 0), ("j.m_x", 0), ("j.m_2", 1), ("j.m_4", 3), ("j.m_5", 0)],
)
def test_learners_take_turns(worker: str, place: int) -> None:
    environment: dict[str, str] = {}
    assert choose_gpu(worker, environment=environment, count=lambda: 4) == OwnGpu(
        place, 4, ("0", "1", "2", "3")
    )
    assert environment == {VISIBLE: str(place), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("listed", "own"), [("3,5", "5"), ("GPU-a, GPU-b", "GPU-b"), ("MIG-1/2,MIG-3/4", "MIG-3/4")]
)
def test_listed_gpus_are_used(listed: str, own: str) -> None:
    """Given the GPUs that a scheduler or the machine's owner allows, a learner gets one of them."""
    environment = {VISIBLE: listed}
    assert choose_gpu("j.m_2", environment=environment, count=lambda: 2) == OwnGpu(
        1, 2, tuple(name.strip() for name in listed.split(","))
    )
    assert environment[VISIBLE] == own


def test_workers_of_several_gpus_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")
    seen = []
    for worker in ("j.m", "j.m_2"):
        gpu = choose_gpu(worker, environment={}, count=lambda: 4).of_several(2)
        seen.append([os.environ[VISIBLE], gpu.variables_of(1)[VISIBLE], gpu.visible(2)])

    assert seen == [["0", "1", "0,1"], ["2", "3", "2,3"]]


@pytest.mark.parametrize(
    ("setting", "gpus", "ranks"),
    [(None, 8, 1), (1, 8, 1), ("all", 8, 8), (4, 2, 2), (4, 0, 4), ("all", 0, 1)],
)
def test_gpus_of_a_worker(setting: str | int | None, gpus: int, ranks: int) -> None:
    assert ranks_of(Workers(gpus=setting), gpus) == ranks


@pytest.mark.parametrize(
    ("gpus", "fields", "facts", "why"),
    [
        (8, {}, {}, ""),
        (8, {}, {"batch_size": 127}, "up to 4 machines with 8 GPUs share a batch of 127, and each"),
        (8, {"workers": {"max": 1}}, {"batch_size": 32}, ""),
        (8, {"batch": "worker"}, {"batch_size": 32}, ""),
        (8, {"update": {"rule": "vc-asgd"}}, {"batch_size": 32}, ""),
        (8, {"update": {"rule": "vc-asgd"}}, {"batch_size": 31}, "8 GPUs share a batch of 31, "),
        (2, {}, {"min_local_batch": 16}, ""),
        (
            *(4, {}, {"min_local_batch": 16, "min_local_batch_why": "BatchNorm1d 1 normalizes"}),
            "up to 4 machines with 4 GPUs share a batch of 128, and each GPU needs 16 samples, bec",
        ),
        (2, {}, {"batch_weight": 1.5}, "parts of its batches don't count by their samples"),
        (2, {}, {"layout": Layout((AVERAGE,))}, "teacher beside the model would not travel"),
        (2, {}, {"layout": Layout((), doubles=("0.weight",))}, "0.weight would travel as float32"),
        (2, {}, {"layout": Layout((LATEST,))}, "versions would have the mean of 0.u"),
        (2, {}, {"sparse": True}, "sparse gradients can't be added"),
    ],
)
def test_gpus_of_a_worker_by_default(
    gpus: int, fields: dict[str, Any], facts: dict[str, Any], why: str
) -> None:
    spec = JobSpec.parse({"name": "j", "task": "t:T", "epochs": 1, **fields})
    facts = {**facts}
    sparse, layout = facts.pop("sparse", False), facts.pop("layout", Layout(())).to_json()
    values = {"batch_size": 128, "min_local_batch": 2, **facts}
    apart = why_apart(spec, ModelFacts(1000, 100, layout, "", **values), gpus, sparse=sparse)
    assert apart.startswith(why) if why else not apart


@pytest.mark.parametrize(
    ("fields", "volunteer", "why"),
    [
        ({}, False, ""),
        ({}, True, "updates of several processes can't be verified"),
        ({"on_bad_sample": "skip"}, False, "on_bad_sample: skip"),
        ({"tuning": {"learners_per_machine": 2}}, False, "tuning.learners_per_machine lets"),
    ],
)
def test_jobs_that_need_a_process_for_each_worker(
    fields: dict[str, Any], volunteer: bool, why: str
) -> None:
    spec = JobSpec.parse({"name": "j", "task": "t:T", "epochs": 1, **fields})
    found = why_one_process(spec, volunteer=volunteer)
    assert found.startswith(why) if why else not found


def test_a_default_is_no_field_that_other_versions_refuse() -> None:
    job = {"name": "j", "task": "t:T", "epochs": 1}
    assert "gpus" not in JobSpec.parse(job).model_dump(mode="json")["workers"]
    assert JobSpec.parse(job).workers.gpus is None


@pytest.mark.parametrize("environment", [{}, {VISIBLE: ""}])
def test_no_gpu(environment: dict[str, str]) -> None:
    before = dict(environment)
    gpu = choose_gpu("j.m_2", environment=environment, count=lambda: 0)
    assert (gpu, gpu.device, environment) == (OwnGpu(), "cpu", before)


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ({**CARD, "utilization": 97}, {"gpu_utilization": 97.0, "flops_utilization": 0.01}),
        (CARD, {"gpu_utilization": None, "flops_utilization": 0.01}),
        ({**CARD, "name": "Card of tomorrow"}, {"gpu_utilization": None}),
    ],
)
@pytest.mark.ci
def test_use_of_a_gpu(card: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    """The share of the peak is known for known cards only."""
    assert on_gpus(tmp_path, USE, [card]) == {"samples_per_second": 10.0, **expected}


def test_samples_per_second_are_those_of_the_last_minute() -> None:
    now = 0.0
    use = Throughput(OwnGpu(), lambda: now)

    def rate(at: float, samples: int) -> float | None:
        nonlocal now
        now = at
        found: float | None = use.fields(samples, None)["samples_per_second"]
        return found

    assert rate(0.0, 0) is None
    # A worker's preparation is no training.
    assert rate(50.0, 640) is None
    assert rate(51.0, 640) is None
    assert rate(54.0, 1280) == 160.0
    assert rate(60.0, 1280) == 160.0
    # A worker that stands still has no rate.
    assert rate(120.0, 1280) is None
    assert rate(130.0, 1920) is None


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "many", True])
def test_operations_of_a_sample_are_a_number_above_0(value: Any) -> None:
    task = vcasgd.Task()
    assert flops_per_sample_of(task) is None
    task.flops_per_sample = 3
    assert flops_per_sample_of(task) == 3.0
    task.flops_per_sample = value
    with pytest.raises(SpecError, match="flops_per_sample"):
        flops_per_sample_of(task)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_real_gpu() -> None:
    gpu = choose_gpu("j.m", environment={})
    assert gpu.count == torch.cuda.device_count()
    torch.zeros(1, device="cuda")
    assert torch.cuda.get_device_name() in gpu.device
