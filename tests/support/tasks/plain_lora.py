"""LoRA by hand on 26 million frozen parameters, most of them quantized to 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vcasgd

ROWS, WIDTH, RANK, CLASSES = 25_000, 1000, 4, 2


class Quantized(nn.Module):
    """An embedding of uint8 values with a common scale."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(256, (ROWS, WIDTH), dtype=torch.uint8)
        self.values = nn.Parameter(values, requires_grad=False)
        self.register_buffer("zero", torch.tensor(128, dtype=torch.uint8))

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.values[tokens].float() - self.zero.float()) / 128


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Quantized()
        self.hidden = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH)
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        pooled = self.embedding(tokens).mean(1)
        adapted = self.hidden(pooled) + pooled @ self.down.T @ self.up.T
        return self.head(adapted)


class PlainLora(vcasgd.Task):
    """Classification of ``samples`` sequences of 8 tokens."""

    batch_size = 4

    def __init__(self, samples: int = 64) -> None:
        self.samples = samples

    def model(self) -> nn.Module:
        return Network()

    def base_buffers(self, model: nn.Module) -> list[str]:
        return ["embedding.zero"]

    def dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(len(split))
        tokens = torch.randint(ROWS, (self.samples, 8), generator=generator)
        return TensorDataset(tokens, tokens.sum(1) % CLASSES)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(model(tokens), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        count = torch.tensor(len(batch[0]))
        return {"loss": self.loss(model, batch) * count, "count": count}
