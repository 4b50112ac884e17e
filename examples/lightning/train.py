"""Digits with Lightning, as in the MNIST example of its documentation, on spot machines."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from vcasgd.integrations.lightning import ModuleTask


class LitDigits(LightningModule):
    def __init__(self, hidden=64, learning_rate=2e-3):
        super().__init__()
        self.learning_rate = learning_rate
        self.model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return [optimizer], [scheduler]


class DigitsData(LightningDataModule):
    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
        split = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(digits, [1437, 360], generator=split)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=120)


task = ModuleTask(LitDigits, DigitsData)

if __name__ == "__main__":
    Trainer(max_epochs=10).fit(LitDigits(), DigitsData())
