"""A loop with Accelerate as a job: the same steps, and refusals of what can't work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import trained_on
from support.compat import simulated
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import vcasgd
from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.rates import Rates
from vcasgd.session.script import ScriptTask, load
from vcasgd.task.place import Place

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate"


@pytest.fixture(autouse=True)
def state() -> Iterator[Any]:
    """Return the state of accelerators, empty before and after a test."""
    state = pytest.importorskip("accelerate.state", reason="needs the extra accelerate")
    yield state
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptTask]]:
    """Return a function that runs a script as a task, up to its first batch."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tasks: list[ScriptTask] = []

    def start(folder: Path = EXAMPLE, **args: Any) -> ScriptTask:
        task = load("train.py", {"epochs": 4, **args}, folder)
        assert isinstance(task, ScriptTask)
        tasks.append(task)
        task.model()
        return task

    yield start
    for task in tasks:
        task.close()
        assert task.ended


def trained_loop(task: ScriptTask, batch: int, count: int, epoch_steps: int) -> nn.Module:
    """Train the example's first model in a plain loop on the first samples, in order."""
    model, dataset = task.model(), task.dataset("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * epoch_steps)
    for start in range(0, count * batch, batch):
        inputs, targets = default_collate([dataset[start + nth] for nth in range(batch)])
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    return model


def trained_interval(task: ScriptTask, batch: int, count: int, epoch_steps: int) -> nn.Module:
    """Train the script's model as a worker does, on the same samples at the same progress."""
    model = task.network
    assert model is not None
    own = task.optimizer(list(model.parameters()))
    rates = Rates(task, own)
    interval = trained_on(
        *(task, model, own, count * batch, batch),
        before_step=lambda done: rates.follow(Place((done // batch + 0.5) / (4 * epoch_steps))),
    )
    assert (interval.samples, interval.steps) == (count * batch, count)
    return model


def assert_same(ours: nn.Module, theirs: nn.Module, first: nn.Module) -> None:
    """Fail unless two models are equal, and trained."""
    for own, other, before in zip(
        ours.parameters(), theirs.parameters(), first.parameters(), strict=True
    ):
        torch.testing.assert_close(own, other)
        assert not torch.equal(own, before)


@pytest.mark.parametrize(
    ("accumulate", "batch", "epoch_steps"),
    [(1, 32, 45), (4, 128, 12), (4, 50, 12), (4, 32, 12), (4, 3, 12)],
)
def test_local_steps_are_those_of_the_loop(
    start: Callable[..., ScriptTask], accumulate: int, batch: int, epoch_steps: int
) -> None:
    """In a smaller part of the job's batch, a step has fewer batches of the loop."""
    example = start(accumulate=accumulate)
    assert example.batch_size == 32 * accumulate

    expected = trained_loop(example, batch, count=5, epoch_steps=epoch_steps)
    assert_same(trained_interval(example, batch, 5, epoch_steps), expected, example.model())


def test_simulated_workers_accumulate_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])

    ends = simulated(lambda: load("train.py", {"accumulate": 4}, EXAMPLE), 2, max_steps=40)

    assert ends["loss"] < 2


def test_steps_of_a_scaler_are_those_of_a_loop_with_it(
    start: Callable[..., ScriptTask], tmp_path: Path
) -> None:
    # Given the example with a scaler as Accelerate makes it for fp16, which needs a GPU
    code = (EXAMPLE / "train.py").read_text()
    made = "accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)\n"
    assert made in code
    scaler = f'{made}accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale={{}})\n'
    (tmp_path / "train.py").write_text(code.replace(made, scaler.format("2.0**20")))
    example = start(tmp_path, accumulate=4)

    # Then its steps are those of the loop
    expected = trained_loop(example, 128, count=5, epoch_steps=12)
    assert_same(trained_interval(example, 128, 5, epoch_steps=12), expected, example.model())


def session() -> vcasgd.Session:
    model = torch.nn.Linear(1, 1)
    return vcasgd.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_loop_without_accumulate_is_refused() -> None:
    import accelerate

    # Given a loop that makes a step for each batch, although it should accumulate
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    own = session()
    loader = accelerator.prepare(own.loader([torch.ones(1)] * 4, 1))
    optimizer = accelerator.prepare(own._optimizer)

    batches = iter(loader)
    batch = next(batches)
    accelerator.backward(own._model(batch).mean())
    with pytest.raises(UserCodeError, match=r"before the last .* in accelerator\.accumulate"):
        optimizer.step()


def test_two_numbers_of_batches_are_refused() -> None:
    import accelerate

    accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = session().loader([torch.ones(1)], gradient_accumulation_steps=2)
    with pytest.raises(SpecError, match="over 2 batches, and the Accelerator over 4"):
        iter(loader)


def test_steps_that_the_end_of_a_loader_does_not_end_are_refused() -> None:
    import accelerate

    plugin = accelerate.utils.GradientAccumulationPlugin(4, sync_with_dataloader=False)
    accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    with pytest.raises(SpecError, match="sync_with_dataloader=False: workers share a batch"):
        iter(session().loader([torch.ones(1)]))


def test_an_epoch_on_its_own_ends_with_a_step() -> None:
    import accelerate

    # Given 5 batches, whose gradients are accumulated over 2
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    own = session()
    model, optimizer, loader = accelerator.prepare(
        own._model, own._optimizer, own.loader([torch.ones(1)] * 5, 1)
    )
    steps = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                steps.append(accelerator.sync_gradients)

    assert steps == [False, True, False, True, True] * 2
    assert not accelerator.gradient_state.in_dataloader


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
