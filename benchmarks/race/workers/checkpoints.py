"""Checkpoints of the contenders that restart from one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common import Training


@dataclass
class Done:
    """Steps and samples in the model."""

    steps: int = 0
    samples: int = 0


def save(path: Path, training: Training, done: Done) -> None:
    """Write model, optimizer, and what is done, so that a reader never sees a part of it."""
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "done": asdict(done),
    }
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.rename(path)


def load(path: Path, training: Training) -> Done:
    """Load a checkpoint, and return what was done; nothing without one."""
    if not path.exists():
        return Done()
    state = torch.load(path)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    return Done(**state["done"])
