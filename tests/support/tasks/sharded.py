"""A small GPT whose parts can be in several processes."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from ranked import Ranked
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

TOKENS, LENGTH, WIDTH = 11, 5, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        normal = self.norm(states)
        states = states + self.attention(normal, normal, normal, attn_mask=mask)[0]
        return states + self.narrow(torch.tanh(self.wide(states)))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        states = self.tokens(tokens) + self.places
        for block in self.blocks:
            states = block(states, self.mask)
        return self.head(states)


class Sharded(Ranked):
    """Predicts the next number of a sequence."""

    batch_size = 12
    clip_norm = 0.5
    evaluation_batch_size = 8

    def __init__(self, parallel: str = "fsdp", parts: int = 1, **args: Any) -> None:
        super().__init__(parallel=parallel, **args)
        self.gradient_accumulation_steps = parts

    def model(self) -> nn.Module:
        return Gpt()

    def dataset(self, split: str) -> TensorDataset:
        random = torch.Generator().manual_seed(1)
        first = torch.randint(0, TOKENS, (118 if split == "train" else 37, 1), generator=random)
        return TensorDataset((first + torch.arange(LENGTH + 1)) % TOKENS)

    def loss_of(self, model: nn.Module, batch: Any, reduction: str) -> Tensor:
        (tokens,) = batch
        found = model(tokens[:, :-1])
        return F.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)

    def compute(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss_of(model, batch, "mean")

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        count = torch.tensor(len(batch[0]))
        return {"loss": self.loss_of(model, batch, "sum") / LENGTH, "count": count}


class Wide(Sharded):
    """Has a model of ``layers`` million parameters, and notes how much memory each process needs.

    The file in ``folder`` named after a process has the most bytes that it had in memory since the
    task was made.
    """

    batch_size = 8

    def __init__(self, layers: int = 32, folder: str = "", **args: Any) -> None:
        super().__init__(**args)
        self.layers, self.folder = layers, Path(folder)
        # An optimizer imports it, and it is large.
        importlib.import_module("torch._dynamo")
        self.before = _most_memory()

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(self.layers)))

    def dataset(self, split: str) -> TensorDataset:
        return TensorDataset(torch.arange(64.0)[:, None] / 64)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=1e-2)

    def loss_of(self, model: nn.Module, batch: Any, reduction: str) -> Tensor:
        wanted = batch[0].expand(-1, 1024)
        found = F.mse_loss(model(wanted), wanted, reduction=reduction)
        (self.folder / str(os.getpid())).write_text(str(_most_memory() - self.before))
        return found


def _most_memory() -> int:
    """Return the most bytes of this process that were in memory, those that it shares included."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
