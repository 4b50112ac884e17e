"""Modules of Lightning end as with Lightning's own trainer on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compat.test_buffers import facts_of
from support.compat import Metrics, Points, assert_close, grid, on_workers, orders, simulated
from support.harness import Harness
from torch.utils.data import DataLoader, IterableDataset

from vcasgd.learning.layout import Layout
from vcasgd.store.ledger.job import JobState
from vcasgd.task.task import Task

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS, EPOCHS, BATCH = (0, 1), 2, 64


@pytest.fixture(autouse=True)
def lightning() -> ModuleType:
    """Return the library; the import takes seconds, so tests of other files don't need it."""
    module: ModuleType = pytest.importorskip(
        "lightning.pytorch", reason="needs the extra lightning"
    )
    return module


def module_of(name: str) -> type[Any]:
    """Return a class of :mod:`support.lightning_modules`, which imports the library."""
    from support import lightning_modules

    found: type[Any] = getattr(lightning_modules, name)
    return found


class Batches:
    """Batches of a job's order, an epoch after the other."""

    def __init__(self, seed: int) -> None:
        self._orders = list(orders(Points.samples, EPOCHS, seed, BATCH))
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._orders) // EPOCHS

    def __iter__(self) -> Iterator[list[int]]:
        first, self._epoch = self._epoch * len(self), self._epoch + 1
        return iter(self._orders[first : first + len(self)])


def by_lightning(make: Callable[[], Any], seed: int, folder: Path, **options: Any) -> Metrics:
    """Train and evaluate a module as Lightning does, with options of its trainer."""
    from lightning.pytorch import Trainer

    torch.manual_seed(seed)
    module = make()
    loader = module.train_dataloader()
    if not isinstance(loader.dataset, IterableDataset):
        loader = DataLoader(loader.dataset, batch_sampler=Batches(seed))
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
    return {
        name.removeprefix("val_"): float(each) for name, each in trainer.callback_metrics.items()
    }


def task_of(make: Callable[[], Any], **options: Any) -> Callable[[], Task]:
    from vcasgd.integrations.lightning import ModuleTask

    return lambda: ModuleTask(make, **options)()


#: Modules whose test takes a few seconds more, and holds nothing that those of others don't.
FURTHER = (
    "Clamped",
    "ClampedInHook",
    "Clipping",
    "Counters",
    "WarmUp",
    "Several",
    "AtTheEnd",
    "Streams",
    "Thaws",
)


@grid
@pytest.mark.parametrize(
    "name",
    [
        "OneCycle",
        "Manual",
        *(pytest.param(name, marks=pytest.mark.extended) for name in FURTHER),
    ],
)
@pytest.mark.ci
def test_a_module_ends_as_with_lightning(workers: int, name: str, tmp_path: Path) -> None:
    make = module_of(name)
    expected = [by_lightning(make, seed, tmp_path)["loss"] for seed in SEEDS]

    ends = [simulated(task_of(make), workers, seed, epochs=EPOCHS)["loss"] for seed in SEEDS]

    assert_close(ends, expected)


@grid
@pytest.mark.ci
def test_steps_in_turn_need_large_parts(workers: int, tmp_path: Path) -> None:
    from vcasgd.integrations.lightning import ModuleTask

    class Halves(ModuleTask):
        min_local_batch = BATCH // 2

    make = module_of("Two")
    expected = [by_lightning(make, seed, tmp_path)["loss"] for seed in SEEDS]

    ends = [simulated(Halves(make), workers, seed, epochs=EPOCHS)["loss"] for seed in SEEDS]

    assert_close(ends, expected)


@pytest.mark.ci
def test_gradients_are_clipped_by_value(tmp_path: Path) -> None:
    class Module(module_of("Module")):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    expected = [by_lightning(Module, seed, tmp_path, **options)["loss"] for seed in SEEDS]

    make = task_of(Module, **options)
    ends = [simulated(make, 8, seed, epochs=EPOCHS)["loss"] for seed in SEEDS]

    assert_close(ends, expected)
    with closing(make()) as task:
        assert "loop-clips" not in facts_of(task).notes


@pytest.mark.parametrize(
    ("name", "noted"), [("Backward", True), ("Clamped", False), ("Clipping", False)]
)
def test_changes_of_gradients_that_may_be_others_are_noted(name: str, noted: bool) -> None:
    with closing(task_of(module_of(name))()) as task:
        assert ("loop-clips" in facts_of(task).notes) is noted


@pytest.mark.parametrize(("name", "travel"), [("Clamped", True), ("WarmUp", False)])
def test_gradients_travel_if_the_module_changes_them_and_no_other_of_its_file(
    name: str, travel: bool
) -> None:
    with closing(task_of(module_of(name))()) as task:
        assert Layout.from_json(facts_of(task).layout).gradients is travel


@pytest.mark.parametrize(("name", "noted"), [("Two", True), ("Manual", False)])
def test_steps_in_turn_are_noted(name: str, noted: bool) -> None:
    with closing(task_of(module_of(name))()) as task:
        notes = facts_of(task).notes

    assert ("steps-in-turn" in notes) is noted


def test_a_module_may_ask_for_the_batches_of_an_epoch() -> None:
    asked = []

    class Asks(module_of("Module")):  # type: ignore[misc]
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

    class Asks(module_of("Module")):  # type: ignore[misc]
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
    expected = [by_lightning(module_of("Module"), seed, tmp_path)["loss"] for seed in SEEDS]
    make = task_of(module_of("Cautious"))
    skips = {"on_bad_sample": "skip", "max_bad_samples": 0.05, "epochs": EPOCHS}

    # Simulated workers count batches in a row together, of which a job leaves out at most three.
    ends = [simulated(make, 2, seed, **skips)["loss"] for seed in SEEDS]

    assert_close(ends, expected)


#: A module with hooks that keep something between batches, and a callback that ends the training.
TRAIN = """
import sys
sys.path.insert(0, {support!r})
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch.nn import functional as F
from torch.utils.data import DataLoader
from support.compat import Points
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


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = Points().model()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(Points().dataset("train"), batch_size=64, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Points().dataset("validation"), batch_size=512)


task = ModuleTask(Module, callbacks=[Average(), EarlyStopping("val_loss", patience=2)])
"""


@pytest.mark.ci
def test_the_evaluations_of_the_job_drive_early_stopping(harness: Harness, tmp_path: Path) -> None:
    # Given a module that overfits after a few epochs
    source = TRAIN.format(support=str(Path(__file__).parents[1]))
    (tmp_path / "train.py").write_text(source)

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
