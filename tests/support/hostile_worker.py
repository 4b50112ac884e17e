"""A worker that trains like any other and, once a file exists, pushes something else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcasgd.verification.exchange import RepetitionExchange, RepetitionRequest
from vcasgd.worker.interval import Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.main import main

ATTACK, BEGUN = "HOSTILE_ATTACK", "HOSTILE_SINCE"


class Forger:
    """Changes updates, float32 [floats], of a model without running statistics."""

    def __init__(self, attack: str, begun: Path) -> None:
        self._attack = attack
        self._begun = begun
        self._kept: Tensor | None = None
        self._noise = torch.Generator().manual_seed(1)
        self._target: Tensor | None = None

    def forged(self, update: Tensor) -> Tensor:
        if not self._begun.exists():
            self._kept = update.clone()
            return update
        noise = torch.randn(len(update), generator=self._noise)
        norm = update.norm()
        match self._attack:
            case "scale":
                return 8 * update
            case "random":
                return noise * norm / noise.norm()
            case "replay":
                return update if self._kept is None else self._kept.clone()
            case "backdoor":
                self._target = noise if self._target is None else self._target
                return update + self._target * (0.3 * norm / self._target.norm())
        raise ValueError(self._attack)


def run() -> int:
    attack, begun = os.environ[ATTACK], Path(os.environ[BEGUN])
    if attack in ON_REPETITIONS:
        ON_REPETITIONS[attack](begun)
        return main()
    forger = Forger(attack, begun)
    honest = Learner.train

    def train(self: Learner, *arguments: Any, **options: Any) -> Trained:
        trained = honest(self, *arguments, **options)
        return replace(trained, update=forger.forged(trained.update))

    Learner.train = train
    return main()


def _poison_momentum(begun: Path) -> None:
    """Push the momentum instead of the update, and commit to the result."""
    honest = Learner.train

    def train(self: Learner, *arguments: Any, **options: Any) -> Trained:
        trained = honest(self, *arguments, **options)
        if begun.exists():
            for state in self.optimizer.state.values():
                momentum = state["momentum_buffer"]
                momentum += 0.05 * momentum.norm() / momentum.numel() ** 0.5
        return trained

    Learner.train = train


def _upload_garbage(begun: Path) -> None:
    honest = RepetitionExchange.upload

    def upload(
        self: RepetitionExchange, request: RepetitionRequest, before: Tensor, after: Tensor
    ) -> None:
        if begun.exists():
            before = torch.full((3 * len(before),), 255, dtype=torch.uint8)
        honest(self, request, before, after)

    RepetitionExchange.upload = upload


#: Attacks on repetitions.
ON_REPETITIONS = {"momentum": _poison_momentum, "garbage": _upload_garbage}
