"""A loop with Accelerate as a job: the same steps, and refusals of what can't work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.examples import finish_although_workers_die
from support.harness import Harness
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import vcasgd
from vcasgd.errors import SpecError
from vcasgd.learning.rates import Rates
from vcasgd.learning.training import batches, train
from vcasgd.session.script import ScriptTask, load

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate"


@pytest.fixture(autouse=True)
def state() -> Iterator[Any]:
    """Return the state of accelerators, empty before and after a test."""
    state = pytest.importorskip("accelerate.state", reason="needs the extra accelerate")
    yield state
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptTask]:
    """Return the example as a task, run up to its first batch."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = load("train.py", {"epochs": 4}, EXAMPLE)
    assert isinstance(task, ScriptTask)
    task.model()
    yield task
    task.close()
    assert task.ended


def test_local_steps_are_those_of_the_loop(example: ScriptTask) -> None:
    # Given the example's first model, trained by a plain loop on some samples in order
    expected, dataset = example.model(), example.dataset("train")
    optimizer = torch.optim.AdamW(expected.parameters(), lr=2e-3)
    steps = 4 * 45
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for start in range(0, 5 * 32, 32):
        inputs, targets = example.collate([dataset[start + nth] for nth in range(32)])
        optimizer.zero_grad()
        F.cross_entropy(expected(inputs), targets).backward()
        optimizer.step()
        scheduler.step()

    # When a worker trains the same samples at the same progress
    model = example.network
    assert model is not None
    first = [each.clone() for each in model.parameters()]
    own = example.optimizer(list(model.parameters()))
    rates = Rates(example, own)
    interval = train(
        *(example, model, own, batches(example, dataset, torch.arange(160).numpy()), "cpu"),
        should_stop=lambda: False,
        on_step=lambda: None,
        before_step=lambda done: rates.follow((done // 32 + 0.5) / steps),
    )

    # Then the models are the same
    assert (interval.samples, interval.steps) == (160, 5)
    for ours, theirs, before in zip(model.parameters(), expected.parameters(), first, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not torch.equal(ours, before)


def test_the_example_needs_at_most_five_lines() -> None:
    lines = (EXAMPLE / "train.py").read_text().splitlines()
    assert 1 <= sum("vcasgd" in line or "session" in line for line in lines) <= 5


def session() -> vcasgd.Session:
    model = torch.nn.Linear(1, 1)
    return vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_gradient_accumulation_is_refused() -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = accelerator.prepare(session().loader([torch.ones(1)] * 4))

    with pytest.raises(SpecError, match=r"gradient accumulation: .*multiply the batch size by 4"):
        iter(loader)


def test_a_scaler_of_gradients_is_refused(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate

    accelerate.Accelerator(cpu=True)
    # Without a GPU, Accelerate itself refuses it.
    monkeypatch.setitem(state.AcceleratorState._shared_state, "_mixed_precision", "fp16")
    with pytest.raises(SpecError, match=r"fp16: its scaler .*bf16"):
        iter(session().loader([torch.ones(1)]))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_sharded_models_are_refused(kind: str, state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate

    accelerate.Accelerator(cpu=True)
    monkeypatch.setitem(
        state.PartialState._shared_state, "distributed_type", accelerate.DistributedType(kind)
    )
    with pytest.raises(SpecError, match=f"{kind}: it shards a model .*accelerate config"):
        iter(session().loader([torch.ones(1)]))


def test_a_launch_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match=r"a launch of 2 processes: .*run the script with python"):
        iter(session().loader([torch.ones(1)]))


def test_iterable_data_is_refused() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([])

    with pytest.raises(SpecError, match="each sample needs an index, so that it counts exactly"):
        session().loader(Endless())


@pytest.mark.extended
@pytest.mark.slow
def test_the_loop_learns_although_two_workers_are_killed(harness: Harness) -> None:
    done = finish_although_workers_die(
        harness, EXAMPLE, samples=1437, epochs=20, args={"epochs": 20}
    )
    assert done.best is not None
    assert done.best.metrics["accuracy"] >= 0.93
