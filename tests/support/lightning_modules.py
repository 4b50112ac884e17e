"""Modules of Lightning as their users write them, by what is special about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from support.compat import Points

BATCH = 64


class Lines(IterableDataset[Any]):
    """Yields the samples of a data set."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


class Clamps(Callback):
    """Clamps gradients before each step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad.clamp_(-0.003, 0.003)


class Module(LightningModule):
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


class LastBatch(Module):
    """A scheduler that the module steps in the last batch of each epoch."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        if self.trainer.is_last_batch:
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
