"""Samples per second of a worker's training loop on image decoding, against a plain PyTorch loop.

``python benchmarks/loading.py [--device cuda] [--workers 2]``. Both loops decode the same JPEG
files with as many loader processes, train the same network, and take turns.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import vcasgd
from vcasgd.spec.job import JobSpec
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner

CLASSES = 10


class Photos(Dataset[tuple[Tensor, int]]):
    """JPEG images of ``edge`` × ``edge`` pixels, decoded, cropped, and flipped at each access."""

    def __init__(self, images: int, edge: int) -> None:
        draw = np.random.default_rng(0)
        self._files = []
        for _ in range(images):
            rough = draw.integers(0, 255, (edge // 8, edge // 8, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(rough).resize((edge, edge)).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(io.BytesIO(self._files[index])).convert("RGB")
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
        top, left = torch.randint(32, (2,)).tolist()
        edge = pixels.shape[1] - 32
        pixels = pixels[:, top : top + edge : 2, left : left + edge : 2]
        return (pixels.flip(2) if torch.rand(()) < 0.5 else pixels), index % CLASSES


class Classify(vcasgd.Task):
    """A small convolutional network on the photos."""

    def __init__(self, photos: Photos, batch: int, workers: int) -> None:
        self.photos, self.batch_size, self.loader_workers = photos, batch, workers

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))

    def dataset(self, split: str) -> Photos:  # noqa: ARG002 - one split
        return self.photos

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Plain:
    """A plain loop with a ``DataLoader`` that keeps its processes."""

    def __init__(self, task: Classify, device: str) -> None:
        self._device = device
        self._model = task.model().to(device)
        self._optimizer = task.optimizer(self._model.parameters())
        self._loader = DataLoader(
            task.photos,
            task.batch_size,
            shuffle=True,
            num_workers=task.loader_workers,
            persistent_workers=True,
            pin_memory=device == "cuda",
        )

    def epoch(self) -> None:
        for images, labels in self._loader:
            loss = F.cross_entropy(
                self._model(images.to(self._device, non_blocking=True)),
                labels.to(self._device, non_blocking=True),
            )
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        if self._device == "cuda":
            torch.cuda.synchronize()


class Worker:
    """A worker's learner: 4 subtasks an epoch with a push interval of 4 steps."""

    def __init__(self, task: Classify, device: str) -> None:
        spec = {"name": "loading", "task": "t:T", "epochs": 100, "subtasks_per_epoch": 4}
        update = {"rule": "async-local-sgd"}
        self._learner = Learner(
            JobSpec.parse({**spec, "update": update, "push_every": 4}), task, device
        )
        self._learner.start_subtask()
        self._subtask = 0

    def epoch(self) -> None:
        learner, plan = self._learner, self._learner.plan
        base = Base(*learner.initial()) if not self._subtask else self._base
        self._base = base
        for subtask in range(self._subtask, self._subtask + plan.subtasks_per_epoch):
            start = 0
            while start < plan.size(subtask):
                stop = learner.interval_stop(subtask, start)
                start = learner.train(
                    *(base, subtask, start, stop),
                ).stop
        self._subtask += plan.subtasks_per_epoch


def main() -> None:
    """Print the rates of both loops and the median of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--edge", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = Classify(Photos(given.images, given.edge), given.batch, given.workers)
    loops = {"plain": Plain(task, given.device), "worker": Worker(task, given.device)}
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(given.rounds + 1):
        for name, loop in loops.items():
            started = time.perf_counter()
            loop.epoch()
            # The first epoch starts the processes.
            if turn:
                rates[name].append(given.images / (time.perf_counter() - started))
    ratios = [worker / plain for plain, worker in zip(*rates.values(), strict=True)]
    for name, values in rates.items():
        sys.stdout.write(f"{name}: {median(values):.0f} samples/s\n")
    sys.stdout.write(f"ratio: {median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})\n")


if __name__ == "__main__":
    main()
