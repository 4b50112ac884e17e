"""Modules of Lightning end as with Lightning's own trainer on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compat import (
    SEEDS,
    EpochBatches,
    Points,
    assert_close,
    ends_of,
    extended,
    facts_of,
    grid,
    on_workers,
    script,
    simulated,
)
from support.harness import Harness
from torch.utils.data import DataLoader, IterableDataset

from vcasgd.learning.layout import Layout
from vcasgd.store.ledger.job import JobState
from vcasgd.task.task import Task

pytestmark = pytest.mark.usefixtures("one_thread", "lightning")

EPOCHS, BATCH = 2, 64


def module_of(name: str) -> type[Any]:
    """Return a class of :mod:`support.lightning_modules`, which imports the library."""
    from support import lightning_modules

    found: type[Any] = getattr(lightning_modules, name)
    return found


def by_lightning(make: Callable[[], Any], folder: Path, **options: Any) -> list[float]:
    """Train modules as Lightning does, with options of its trainer; return a loss for each seed."""
    return [_by_lightning(make, seed, folder, **options) for seed in SEEDS]


def _by_lightning(make: Callable[[], Any], seed: int, folder: Path, **options: Any) -> float:
    from lightning.pytorch import Trainer

    torch.manual_seed(seed)
    module = make()
    loader = module.train_dataloader()
    if not isinstance(loader.dataset, IterableDataset):
        loader = DataLoader(loader.dataset, batch_sampler=EpochBatches(EPOCHS, seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            **options,
        )
        trainer.fit(module, loader, module.val_dataloader())
    return float(trainer.callback_metrics["val_loss"])


def task_of(make: Callable[[], Any], **options: Any) -> Callable[[], Task]:
    from vcasgd.integrations.lightning import ModuleTask

    return lambda: ModuleTask(make, **options)()


@grid
@pytest.mark.parametrize(
    "name",
    [
        "OneCycle",
        "Manual",
        # These take a few seconds more, and hold nothing that those of others don't.
        *extended("Clamped", "ClampedInHook", "Clipping", "Counters", "WarmUp", "Several"),
        *extended("AtTheEnd", "Streams", "Thaws"),
    ],
)
@pytest.mark.ci
def test_a_module_ends_as_with_lightning(workers: int, name: str, tmp_path: Path) -> None:
    make = module_of(name)

    assert_close(ends_of(task_of(make), workers, epochs=EPOCHS), by_lightning(make, tmp_path))


def test_a_module_may_step_its_scheduler_in_the_last_batch_of_an_epoch() -> None:
    rates: list[float] = []

    class LastBatch(module_of("LastBatch")):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

    simulated(task_of(LastBatch), 2, epochs=EPOCHS)

    # The first step of a new worker has a lower rate
    assert 0.1 in rates
    assert rates[-1] == 0.05


@grid
@pytest.mark.ci
def test_steps_in_turn_need_large_parts(workers: int, tmp_path: Path) -> None:
    from vcasgd.integrations.lightning import ModuleTask

    class Halves(ModuleTask):
        min_local_batch = BATCH // 2

    make = module_of("Two")

    assert_close(ends_of(Halves(make), workers, epochs=EPOCHS), by_lightning(make, tmp_path))


@pytest.mark.ci
def test_gradients_are_clipped_by_value(tmp_path: Path) -> None:
    class Module(module_of("Module")):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    make = task_of(Module, **options)

    assert_close(ends_of(make, 8, epochs=EPOCHS), by_lightning(Module, tmp_path, **options))
    with closing(make()) as task:
        assert "loop-clips" not in facts_of(task).notes


@pytest.mark.parametrize(
    ("name", "note", "noted"),
    [
        # What changes gradients may be others' code.
        ("Backward", "loop-clips", True),
        ("Clamped", "loop-clips", False),
        ("Clipping", "loop-clips", False),
        ("Two", "steps-in-turn", True),
        ("Manual", "steps-in-turn", False),
    ],
)
def test_what_is_approximated_is_noted(name: str, note: str, noted: bool) -> None:
    with closing(task_of(module_of(name))()) as task:
        assert (note in facts_of(task).notes) is noted


def test_a_module_in_16_bits_is_divided() -> None:
    with closing(task_of(module_of("Module"), precision="bf16-true")()) as task:
        assert facts_of(task).min_local_batch == 2


@pytest.mark.parametrize(("name", "travel"), [("Clamped", True), ("WarmUp", False)])
def test_gradients_travel_if_the_module_changes_them_and_no_other_of_its_file(
    name: str, travel: bool
) -> None:
    with closing(task_of(module_of(name))()) as task:
        assert Layout.from_json(facts_of(task).layout).gradients is travel


def test_a_module_may_ask_for_the_batches_of_an_epoch() -> None:
    asked = []

    class Asks(module_of("Module")):
        def configure_optimizers(self) -> Any:
            self.trainer.fit_loop.setup_data()
            asked.append(len(self.train_dataloader()))
            return super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            asked.append(len(self.trainer.train_dataloader))
            asked.append(len(self.train_dataloader()))
            return super().training_step(batch, batch_idx)

    with closing(task_of(Asks)()) as task:
        facts_of(task)

    assert len(asked) > 1
    assert set(asked) == {Points.samples // BATCH}


def test_a_module_may_ask_whether_a_batch_is_the_last_one_of_its_epoch() -> None:
    last = []

    class Asks(module_of("Module")):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            last.append((batch_idx, self.trainer.is_last_batch))
            return super().training_step(batch, batch_idx)

    simulated(task_of(Asks), 1, epochs=1)

    batches = Points.samples // BATCH
    assert [number for number, is_last in last if is_last] == [batches - 1]
    assert len(last) >= batches


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_module_may_leave_batches_out(tmp_path: Path) -> None:
    make = task_of(module_of("Cautious"))
    skips = {"on_bad_sample": "skip", "max_bad_samples": 0.05}

    # Simulated workers count batches in a row together, of which a job leaves out at most three.
    ends = ends_of(make, 2, epochs=EPOCHS, **skips)

    assert_close(ends, by_lightning(module_of("Module"), tmp_path))


#: A module that overfits, a callback that keeps something between batches, and one that ends the
#: training.
TRAIN = """
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from support.lightning_modules import Module
from vcasgd.integrations.lightning import ModuleTask


class Average(Callback):
    def on_train_start(self, trainer, module):
        self.mean = [each.detach().clone() for each in module.parameters()]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for mine, each in zip(self.mean, module.parameters()):
            mine.lerp_(each.detach(), 0.05)

    def on_validation_start(self, trainer, module):
        self.kept = [each.detach().clone() for each in module.parameters()]
        self.swap(module, self.mean)

    def on_validation_end(self, trainer, module):
        self.swap(module, self.kept)

    def swap(self, module, values):
        with torch.no_grad():
            for each, value in zip(module.parameters(), values):
                each.copy_(value)


class Overfitting(Module):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


task = ModuleTask(Overfitting, callbacks=[Average(), EarlyStopping("val_loss", patience=2)])
"""


@pytest.mark.ci
def test_the_evaluations_of_the_job_drive_early_stopping(harness: Harness, tmp_path: Path) -> None:
    # Given a module that overfits after a few epochs
    script(TRAIN, tmp_path)

    metrics, job = on_workers(harness, tmp_path, "train:task", 2, epochs=30)

    # Then the callback ends it, with the best model, which the average of a callback is
    assert job.state is JobState.SUCCEEDED, job.reason
    assert "EarlyStopping: Monitored metric val_loss did not improve" in (job.reason or "")
    assert job.finished_epochs < 30
    assert job.best is not None
    assert job.final_evaluation == job.best.number
    assert metrics["loss"] > job.best.metrics["loss"]
    (event,) = harness.events(job.id, "hooks-on-workers")
    assert "each worker runs Average for its own batches" in event["text"]
