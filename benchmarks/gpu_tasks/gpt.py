"""A GPT with tied weights on random tokens, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd

TOKENS = 1 << 22
WINDOWS = 1 << 20
#: Distance between two windows; it has no common factor with the number of tokens.
STRIDE = 7919


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.before_attention(x))
        q, k, v = qkv.view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        added: Tensor = self.down(functional.gelu(self.up(self.before_mlp(x))))
        return x + added


class Network(nn.Module):
    def __init__(self, layers: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.place(at))))
        return logits


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

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
