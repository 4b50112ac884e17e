"""A transformer whose steps are paced, and not computed: what is raced is the exchange.

Its gradients are noise, of which each machine has its own, so that updates are as hard to compress
as those of a real model, or harder. Needs torch only.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, WIDTH, VOCABULARY = 8, 512, 16_384
LEARNING_RATE = 1e-3


class PacedTransformer(nn.Module):
    """The parameters of a decoder with tied embeddings, float32, 33.6 million numbers.

    Its output is a number whose gradient is the machine's noise, times a random factor.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        # Initial parameters are the same in every process.
        generator = torch.Generator().manual_seed(0)

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) / columns**0.5)

        self.embedding = matrix(VOCABULARY, WIDTH)
        self.attention = nn.ParameterList(matrix(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.expansion = nn.ParameterList(matrix(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.contraction = nn.ParameterList(matrix(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        noise = torch.Generator().manual_seed(seed)
        self._noise = [torch.randn(each.shape, generator=noise) for each in self.parameters()]
        self._factors = random.Random(seed)

    def forward(self) -> Tensor:
        factor = self._factors.gauss(1.0, 1.0)
        parts = [
            _NoisyGradient.apply(parameter, noise, factor)
            for parameter, noise in zip(self.parameters(), self._noise, strict=True)
        ]
        return torch.stack(parts).sum()


class _NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, noise: Tensor, factor: float) -> Tensor:
        ctx.noise, ctx.factor = noise, factor
        return parameter[0, 0].clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        return ctx.noise * ctx.factor, None, None


class PacedSteps:
    """Model, optimizer, and loss of one machine; the same interface as :class:`cnn.DigitSteps`."""

    def __init__(self, seed: int) -> None:
        self.model = PacedTransformer(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def loss(self, model: nn.Module) -> Tensor:
        """Return a loss of the model, which may be wrapped."""
        loss: Tensor = model()
        return loss
