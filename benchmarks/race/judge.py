"""Accuracy of the snapshots of a run, computed after it."""

from __future__ import annotations

from pathlib import Path

import torch

from cnn import Digits, make_model
from outcomes import TARGET


def judge(folder: Path, data: Path, until: float) -> list[tuple[float, float]]:
    """Return Unix times and accuracies of the snapshots until a Unix time, in order.

    After the first one that reaches the target, only the last one is judged.
    """
    # Names don't sort by time, because contenders choose their own.
    # On a busy machine, one thread is faster.
    torch.set_num_threads(1)
    loaded = (torch.load(path) for path in folder.glob("*.pt"))
    snapshots = sorted((one for one in loaded if one["at"] <= until), key=lambda one: one["at"])
    digits, results = Digits(data, "test"), []
    for nth, snapshot in enumerate(snapshots):
        reached = any(accuracy >= TARGET for _, accuracy in results)
        if not reached or nth == len(snapshots) - 1:
            results.append((snapshot["at"], _accuracy(snapshot["state"], digits)))
    return results


@torch.no_grad()
def _accuracy(state: dict[str, torch.Tensor], digits: Digits) -> float:
    model = make_model()
    model.load_state_dict(state)
    model.eval()
    right = 0
    for start in range(0, len(digits), 1000):
        images, labels = digits.batch(slice(start, start + 1000))
        right += int((model(images).argmax(1) == labels).sum())
    return right / len(digits)
