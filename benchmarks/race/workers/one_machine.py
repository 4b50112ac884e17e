"""One machine with a warm standby, which continues from the last checkpoint.

The standby has imported torch and loaded the data, and waits for the lock that the machine holds
while it lives.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import torch

from common import Notice, Reporter, Training, worker_options


def save(path: Path, training: Training, steps: int) -> None:
    part = path.with_suffix(".part")
    state: dict[str, Any] = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "steps": steps,
    }
    torch.save(state, part)
    part.rename(path)


def load(path: Path, training: Training) -> int:
    """Load the checkpoint, and return its number of steps; 0 without one."""
    if not path.exists():
        return 0
    state = torch.load(path)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    return int(state["steps"])


def main() -> None:
    options = worker_options()
    notice, training = Notice(), Training(options)
    lock = os.open(options.folder / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    checkpoint, reporter = options.folder / "checkpoint.pt", Reporter(options)
    steps = load(checkpoint, training)
    while not notice.given:
        training.backward()
        training.optimizer.step()
        steps += 1
        reporter.step()
        if steps % options.sync_every == 0:
            save(checkpoint, training, steps)
            reporter.commit(steps * options.batch, training.model)
    save(checkpoint, training, steps)
    reporter.commit(steps * options.batch, training.model)


if __name__ == "__main__":
    main()
