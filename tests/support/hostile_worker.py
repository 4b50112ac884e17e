"""A worker that trains like any other and, once a file exists, pushes something else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcasgd.worker.interval import Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.main import main

ATTACK, BEGUN = "HOSTILE_ATTACK", "HOSTILE_SINCE"


def forged_log(begun: Path) -> Path:
    """Return the file with a byte for each update that was forged."""
    return begun.with_suffix(".forged")


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
        with forged_log(self._begun).open("ab") as log:
            log.write(b".")
        noise = torch.randn(len(update), generator=self._noise)
        norm = update.norm()
        match self._attack:
            case "flip":
                return -update
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
    forger = Forger(os.environ[ATTACK], Path(os.environ[BEGUN]))
    honest = Learner.train

    def train(self: Learner, *arguments: Any, **options: Any) -> Trained:
        trained = honest(self, *arguments, **options)
        return replace(trained, update=forger.forged(trained.update))

    Learner.train = train  # type: ignore[method-assign]
    return main()
