"""A module of Lightning as a task: the same steps, and refusals of what can't work."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.repeated import Machine, assert_not_repeated
from torch import nn
from torch.utils.data import DataLoader

from vcasgd.errors import SpecError
from vcasgd.learning.rates import Rates
from vcasgd.learning.training import batches, train
from vcasgd.task.task import Task, load_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning"


@pytest.fixture(autouse=True)
def lightning() -> ModuleType:
    """Return the library; the import takes seconds, so tests of other files don't need it."""
    module: ModuleType = pytest.importorskip(
        "lightning.pytorch", reason="needs the extra lightning"
    )
    return module


pytestmark = pytest.mark.usefixtures("one_thread")


def example(**args: Any) -> Task:
    return load_task("train:task", args, EXAMPLE)


def task_of(module: type[Any], **options: Any) -> Task:
    """Return a task with another module on the example's data."""
    task: Any = example()
    return type(task)(module, task._data, **options)


@pytest.fixture
def one_weight(lightning: ModuleType) -> Any:
    """Return a class of modules with one weight."""

    class OneWeight(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return OneWeight


@pytest.mark.parametrize("steps", [1, 2])
def test_local_steps_are_those_of_lightning(
    lightning: ModuleType, tmp_path: Path, steps: int
) -> None:
    # Given a module that Lightning trains on the samples in order, with clipped gradients
    task: Any = example()
    model = task.model()
    first = {name: each.clone() for name, each in model.state_dict().items()}
    other = task._make()
    other.load_state_dict(first)
    task.gradient_accumulation_steps = steps
    samples = torch.utils.data.Subset(task.dataset("train"), range(128))
    loader = DataLoader(samples, batch_size=32 // steps)
    with warnings.catch_warnings():
        # Lightning advises loader processes, and srun where it is installed.
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=1,
            gradient_clip_val=0.5,
            accumulate_grad_batches=steps,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        trainer.fit(other, loader, loader)

    # When the task makes the same steps
    task.clip_norm = 0.5
    optimizer = task.optimizer(list(model.parameters()))
    rates = Rates(task, optimizer)
    indices = torch.arange(128).numpy()
    train(
        *(task, model, optimizer, batches(task, task.dataset("train"), indices), "cpu"),
        should_stop=lambda: False,
        on_step=lambda: None,
        before_step=lambda done: rates.follow(done / 1280),
    )

    # Then the modules are the same
    for name, each in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], each, msg=name)
    assert not torch.equal(first["model.1.weight"], model.state_dict()["model.1.weight"])


def test_the_schedule_is_that_of_the_scheduler() -> None:
    task = example()
    task.model()

    factors = [task.schedule(epoch / 10) for epoch in range(10)]

    expected = (1 + torch.cos(torch.pi * torch.arange(10) / 10)) / 2
    torch.testing.assert_close(torch.tensor(factors), expected)


def test_manual_optimization_is_refused(one_weight: Any) -> None:
    class Manual(one_weight):  # type: ignore[misc]
        automatic_optimization = False

    with pytest.raises(SpecError, match="manual optimization: the worker makes the steps"):
        task_of(Manual).model()


def test_several_optimizers_are_refused(one_weight: Any) -> None:
    class Several(one_weight):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    task = task_of(Several)
    model = task.model()
    with pytest.raises(SpecError, match="2 optimizers"):
        task.optimizer(list(model.parameters()))


def test_a_scheduler_needs_the_length_of_the_training(one_weight: Any) -> None:
    class Scheduled(one_weight):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    task = task_of(Scheduled)
    task.model()
    with pytest.raises(SpecError, match=r"number of steps .*max_steps"):
        task.schedule(0.0)

    task = task_of(Scheduled, max_steps=4)
    task.model()
    assert [round(task.schedule(at / 4), 6) for at in range(4)] == [1.0, 1.0, 0.1, 0.1]


def test_data_without_an_index_is_refused(one_weight: Any) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([])

    class Streaming(one_weight):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=2)

    task: Any = example()
    with pytest.raises(SpecError, match="train_dataloader of an IterableDataset"):
        type(task)(Streaming).model()


def test_a_repetition_leaves_the_optimizer_of_a_module_alone(one_weight: Any) -> None:
    class OneOptimizer(one_weight):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            if not hasattr(self, "made"):
                self.made = torch.optim.Adam(self.parameters(), lr=0.1)
            return self.made

    assert_not_repeated(Machine(task_of(OneOptimizer)))
