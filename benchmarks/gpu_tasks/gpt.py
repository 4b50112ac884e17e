"""A GPT with tied weights on random tokens, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from gpt_network import Network
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd

TOKENS = 1 << 22
WINDOWS = 1 << 20
#: Distance between two windows; it has no common factor with the number of tokens.
STRIDE = 7919


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Overlapping windows of a random text in which few tokens are frequent."""

    def __init__(self, vocabulary: int, context: int) -> None:
        draw = torch.rand(TOKENS, generator=torch.Generator().manual_seed(0))
        self.tokens, self.context = (draw**4 * vocabulary).int(), context

    def __len__(self) -> int:
        return WINDOWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * STRIDE % (TOKENS - self.context - 1)
        window = self.tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Gpt(vcasgd.Task):
    mixed_precision = "bf16"
    clip_norm = 1.0

    def __init__(
        self, layers: int, width: int, context: int = 512, vocabulary: int = 50_304, batch: int = 32
    ) -> None:
        self.shape = layers, width, context, vocabulary
        self.batch_size = batch
        block = 12 * width * width
        # Two operations for each weight, and attention; backward takes twice as many as forward.
        weights = layers * block + vocabulary * width
        self.flops_per_sample = context * (6.0 * weights + 12.0 * layers * context * width)

    def model(self) -> nn.Module:
        return Network(*self.shape)

    def dataset(self, split: str) -> Windows:  # noqa: ARG002 - one split
        _, _, context, vocabulary = self.shape
        return Windows(vocabulary, context)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        count = torch.tensor(len(batch[0]))
        return {"loss": self.loss(model, batch) * count, "count": count}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
