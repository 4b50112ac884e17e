"""A small LSTM that predicts the next character of a text, with Adam."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import vcasgd

#: Printable ASCII and the line break; any other character becomes a blank.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
#: Share of the text for training, from its beginning; the rest is for validation.
TRAINING_SHARE = 0.9
#: Characters that the network sees before the last one that it predicts.
CONTEXT = 64
#: Characters between the beginnings of two training samples.
STRIDE = 120


class Lstm(vcasgd.Task):
    """``data`` is a text file."""

    batch_size = 32
    clip_norm = 1.0

    def __init__(self, data: str, width: int = 128, learning_rate: float = 2e-2) -> None:
        self.data = Path(data)
        self.width = width
        self.learning_rate = learning_rate

    def model(self) -> nn.Module:
        return Characters(self.width)

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        text = self.data.read_text(encoding="utf-8", errors="replace")
        places = {character: place for place, character in enumerate(ALPHABET)}
        characters = torch.tensor([places.get(character, places[" "]) for character in text])
        cut = int(TRAINING_SHARE * len(characters))
        if split == "train":
            return TensorDataset(characters[:cut].unfold(0, CONTEXT + 1, STRIDE))
        return TensorDataset(characters[cut:].unfold(0, CONTEXT + 1, CONTEXT))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.Adam(parameters, lr=self.learning_rate)

    def schedule(self, progress: float) -> float:
        return 1 - progress

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return _losses(model, batch).mean()

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        losses = _losses(model, batch)
        return {"loss": losses.sum(), "count": torch.tensor(losses.numel())}


class Characters(nn.Module):
    """Network from characters ``[batch, time]`` to scores ``[batch, time, alphabet]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width // 2)
        self.memory = nn.LSTM(width // 2, width, batch_first=True)
        self.scores = nn.Linear(width, len(ALPHABET))

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.memory(self.characters(characters))
        scores: Tensor = self.scores(states)
        return scores


def _losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the cross-entropy of each character after the first of its sample, in nats."""
    (characters,) = batch
    scores = model(characters[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), characters[:, 1:].flatten(), reduction="none")
