"""A small transformer that predicts the next character of a text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd

#: Printable ASCII and the line break; any other character becomes a blank.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
#: Share of the text for training, from its beginning; the rest is for validation.
TRAINING_SHARE = 0.9


class Text(vcasgd.Task):
    """Task that trains on a text file.

    A relative path in ``data`` starts at the folder of this file, which is part of the package.
    """

    batch_size = 32
    clip_norm = 1.0

    def __init__(
        self,
        data: str = "founding.txt",
        context: int = 64,
        stride: int = 16,
        width: int = 64,
        layers: int = 2,
        learning_rate: float = 1e-2,
        parallel: str = "ddp",
    ) -> None:
        self.parallel = parallel
        self.data = Path(__file__).parent / data
        self.context = context
        self.stride = stride
        self.width = width
        self.layers = layers
        self.learning_rate = learning_rate

    def model(self) -> nn.Module:
        return Transformer(self.context, self.width, self.layers)

    def dataset(self, split: str) -> Dataset[Tensor]:
        text = self.data.read_text(encoding="utf-8", errors="replace")
        places = {character: place for place, character in enumerate(ALPHABET)}
        characters = torch.tensor([places.get(character, places[" "]) for character in text])
        cut = int(TRAINING_SHARE * len(characters))
        if split == "train":
            return Windows(characters[:cut], self.context, self.stride)
        return Windows(characters[cut:], self.context, self.context)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.01)

    def schedule(self, progress: float) -> float:
        return min(1.0, progress / 0.05) * 0.5 * (1 + math.cos(math.pi * progress))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        # Mixed precision pays off on a GPU.
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
            return _losses(model, batch).mean()

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        losses = _losses(model, batch)
        return {"loss": losses.sum(), "count": torch.tensor(losses.numel())}


class Windows(Dataset[Tensor]):
    """Windows of ``context`` + 1 characters, int64, one every ``stride``."""

    def __init__(self, characters: Tensor, context: int, stride: int) -> None:
        self.windows = characters.unfold(0, context + 1, stride)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class Transformer(nn.Module):
    """Transformer from characters ``[batch, time]`` to scores ``[batch, time, alphabet]``.

    Input and output share one table; tied parameters are sent once.
    """

    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(context, width)
        nn.init.normal_(self.characters.weight, std=width**-0.5)
        nn.init.normal_(self.places.weight, std=width**-0.5)
        block = nn.TransformerEncoderLayer(
            width,
            nhead=4,
            dim_feedforward=2 * width,
            dropout=0,
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(ALPHABET))
        self.scores.weight = self.characters.weight
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )

    def forward(self, characters: Tensor) -> Tensor:
        time = characters.shape[1]
        inner = self.characters(characters) + self.places.weight[:time]
        inner = self.blocks(inner, mask=self.mask[:time, :time], is_causal=True)
        scores: Tensor = self.scores(self.norm(inner))
        return scores


def _losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy of each character after the first of its window, in nats."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
