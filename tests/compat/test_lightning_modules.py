"""Modules of Lightning end as with Lightning's own trainer on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compat.test_buffers import facts_of
from support.compat import Metrics, Points, assert_close, grid, on_workers, orders, simulated
from support.harness import Harness
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

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


@cache
def modules() -> dict[str, type[Any]]:  # noqa: C901 - The library is imported late.
    """Return the modules by what is special about them."""
    from lightning.pytorch import Callback, LightningModule

    class Clamps(Callback):  # type: ignore[misc]
        """Clamps gradients before each step."""

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.grad.clamp_(-0.003, 0.003)

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = Points().model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def train_dataloader(self) -> Any:
            return DataLoader(Points().dataset("train"), batch_size=BATCH, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(Points().dataset("validation"), batch_size=512)

    class Counters(Module):
        """Noise that decreases with the step, and a weight that follows the epoch."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            points, labels = batch
            noise = 4 * max(0.0, 1 - self.global_step / 100)
            points = points + noise * torch.randn_like(points)
            smoothing = 0.3 if self.current_epoch == 0 else 0.0
            return F.cross_entropy(self.network(points), labels, label_smoothing=smoothing)

    class WarmUp(Module):
        """Warm-up as Lightning's documentation shows it."""

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)

        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
        ) -> None:
            optimizer.step(closure=optimizer_closure)
            scale = min(1.0, (self.trainer.global_step + 1) / 1000.0)
            for group in optimizer.param_groups:
                group["lr"] = scale * 1.0

    class OneCycle(Module):
        """A schedule of the whole training, with its momentum."""

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.3, total_steps=self.trainer.estimated_stepping_batches
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Several(Module):
        """A function for each group at each step, and another scheduler every other epoch."""

        def configure_optimizers(self) -> Any:
            first, _, last = self.network
            optimizer = torch.optim.SGD(
                [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.02}],
                lr=0.1,
                momentum=0.9,
            )
            by_step = torch.optim.lr_scheduler.LambdaLR(
                optimizer, [lambda step: 1 - step / 200, lambda step: 0.2 + step / 200]
            )
            by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [
                {"scheduler": by_step, "interval": "step"},
                {"scheduler": by_epoch, "interval": "epoch", "frequency": 1},
            ]

    class Manual(Module):
        """Steps that the module makes itself."""

        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            self.lr_schedulers().step()

    class Clamped(Manual):
        """Gradients that the module clamps itself."""

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(Module.training_step(self, batch, batch_idx))
            for each in self.parameters():
                each.grad.clamp_(-0.003, 0.003)
            optimizer.step()
            self.lr_schedulers().step()

    class ClampedInHook(Module):
        """Gradients that hooks clamp between their computation and the step."""

        def on_after_backward(self) -> None:
            for each in self.parameters():
                torch.nan_to_num_(each.grad)

        def configure_callbacks(self) -> Any:
            return [Clamps()]

    class Clipping(Module):
        """Clipping that the module configures itself."""

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            for each in self.parameters():
                each.grad.clamp_(-0.003, 0.003)

    class Backward(Module):
        """A change in a function whose caller, for all that is known, changes gradients, too."""

        def backward(self, loss: Any) -> None:
            loss.backward()
            for each in self.parameters():
                each.grad.clamp_(-0.003, 0.003)

    class Two(Module):
        """Two optimizers, as of a generator and its critic, in manual optimization."""

        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            first, _, last = self.network
            return [
                torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
                torch.optim.SGD(last.parameters(), lr=0.03, momentum=0.9),
            ]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                loss = super().training_step(batch, batch_idx)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    class AtTheEnd(Module):
        """A metric that is computed when the validation ends, and one of torchmetrics."""

        def __init__(self) -> None:
            super().__init__()
            from torchmetrics.classification import MulticlassAccuracy

            self.accuracy = MulticlassAccuracy(10, average="micro")
            self.losses: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            answers = self.network(batch[0])
            self.losses.append(F.cross_entropy(answers, batch[1]))
            self.accuracy(answers, batch[1])
            self.log("val_acc", self.accuracy)

        def on_validation_epoch_end(self) -> None:
            self.log("val_loss", torch.stack(self.losses).mean())
            self.losses.clear()

    class Thaws(Module):
        """Layers that a callback of the library thaws in the second epoch."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.network[0]

        def configure_callbacks(self) -> Any:
            from lightning.pytorch.callbacks import BackboneFinetuning

            return [BackboneFinetuning(1, backbone_initial_lr=0.05, verbose=False)]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.network[2].parameters(), lr=0.1, momentum=0.9)

    class Cautious(Module):
        """Batches that it leaves out, and a logger that it uses."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.logger.experiment.add_scalar("loss", loss, self.global_step)
            return None if self.global_step in (10, 40) else loss

    class Streams(Several):
        """Data that can only be iterated over, for training and validation."""

        def train_dataloader(self) -> Any:
            return DataLoader(Lines(Points().dataset("train")), batch_size=BATCH)

        def val_dataloader(self) -> Any:
            return DataLoader(Lines(Points().dataset("validation")), batch_size=512)

    own = (
        Module,
        Counters,
        WarmUp,
        OneCycle,
        Several,
        Manual,
        Clamped,
        ClampedInHook,
        Clipping,
        Two,
        AtTheEnd,
        Streams,
    )
    return {each.__name__: each for each in (*own, Backward, Thaws, Cautious)}


class Lines(IterableDataset[Any]):
    """Yields the samples of a data set."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


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
    if not isinstance(loader.dataset, Lines):
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
    make = modules()[name]
    expected = [by_lightning(make, seed, tmp_path)["loss"] for seed in SEEDS]

    ends = [simulated(task_of(make), workers, seed, epochs=EPOCHS)["loss"] for seed in SEEDS]

    assert_close(ends, expected)


@grid
@pytest.mark.ci
def test_steps_in_turn_need_large_parts(workers: int, tmp_path: Path) -> None:
    from vcasgd.integrations.lightning import ModuleTask

    class Halves(ModuleTask):
        min_local_batch = BATCH // 2

    make = modules()["Two"]
    expected = [by_lightning(make, seed, tmp_path)["loss"] for seed in SEEDS]

    ends = [simulated(Halves(make), workers, seed, epochs=EPOCHS)["loss"] for seed in SEEDS]

    assert_close(ends, expected)


@pytest.mark.ci
def test_gradients_are_clipped_by_value(tmp_path: Path) -> None:
    class Module(modules()["Module"]):  # type: ignore[misc]
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
    with closing(task_of(modules()[name])()) as task:
        assert ("loop-clips" in facts_of(task).notes) is noted


@pytest.mark.parametrize(("name", "noted"), [("Two", True), ("Manual", False)])
def test_steps_in_turn_are_noted(name: str, noted: bool) -> None:
    with closing(task_of(modules()[name])()) as task:
        notes = facts_of(task).notes

    assert ("steps-in-turn" in notes) is noted


def test_a_module_may_ask_for_the_batches_of_an_epoch() -> None:
    asked = []

    class Asks(modules()["Module"]):  # type: ignore[misc]
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

    class Asks(modules()["Module"]):  # type: ignore[misc]
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
    expected = [by_lightning(modules()["Module"], seed, tmp_path)["loss"] for seed in SEEDS]
    make = task_of(modules()["Cautious"])
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
