"""The GPU of each learner, with a fake number of GPUs."""

from __future__ import annotations

import pytest
import torch

from vcasgd.gpus import VISIBLE
from vcasgd.worker.gpus import OwnGpu, choose_gpu
from vcasgd.worker_names import learner_of


@pytest.mark.parametrize(
    ("worker", "place"), [("j.m", 0), ("j.m_2", 1), ("j.m_4", 3), ("j.m_5", 0), ("worker-1", 0)]
)
def test_learners_take_turns(worker: str, place: int) -> None:
    environment: dict[str, str] = {}
    assert choose_gpu(worker, environment=environment, count=lambda: 4) == OwnGpu(place, 4)
    assert environment == {VISIBLE: str(place)}


@pytest.mark.parametrize(
    ("listed", "own"), [("3,5", "5"), ("GPU-a, GPU-b", "GPU-b"), ("MIG-1/2,MIG-3/4", "MIG-3/4")]
)
def test_listed_gpus_are_used(listed: str, own: str) -> None:
    """Given the GPUs that a scheduler or the machine's owner allows, a learner gets one of them."""
    environment = {VISIBLE: listed}
    assert choose_gpu("j.m_2", environment=environment, count=lambda: 2) == OwnGpu(1, 2)
    assert environment == {VISIBLE: own}


@pytest.mark.parametrize("environment", [{}, {VISIBLE: ""}])
def test_no_gpu(environment: dict[str, str]) -> None:
    before = dict(environment)
    gpu = choose_gpu("j.m_2", environment=environment, count=lambda: 0)
    assert (gpu, gpu.device, environment) == (OwnGpu(), "cpu", before)


def test_names_without_a_number_are_of_first_learners() -> None:
    assert [learner_of(each) for each in ("j.m", "j.m_x", "j")] == [1, 1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_real_gpu() -> None:
    gpu = choose_gpu("j.m", environment={})
    assert gpu.count == torch.cuda.device_count()
    torch.zeros(1, device="cuda")
    assert torch.cuda.get_device_name() in gpu.device
