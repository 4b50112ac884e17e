"""A residual network of the shape of ResNet-50 on JPEG files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd

CLASSES = 1000
SAMPLES = 1 << 20
EXPANSION = 4


def write_photos(folder: Path, count: int, edge: int) -> None:
    """Write JPEG files of noise in blocks of 8 pixels, which are about as large as photos."""
    draw = np.random.default_rng(0)
    for number in range(count):
        rough = draw.integers(0, 255, (edge // 8, edge // 8, 3), dtype=np.uint8)
        image = Image.fromarray(rough).resize((edge, edge))
        image.save(folder / f"{number}.jpg", quality=90)


class Photos(Dataset[tuple[Tensor, int]]):
    """The files of a folder again and again, cropped to 7/8 and flipped at random."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index % len(self.files)]) as image:
            edge = image.width // 8 * 7
            left, top = torch.randint(image.width - edge + 1, (2,)).tolist()
            crop = image.convert("RGB").crop((left, top, left + edge, top + edge))
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1)
        return (pixels.flip(2) if torch.rand(()) < 0.5 else pixels), index % CLASSES


def _convolution(inputs: int, outputs: int, edge: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, edge, stride, padding=edge // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.path = nn.Sequential(
            _convolution(inputs, width, 1),
            nn.ReLU(),
            _convolution(width, width, 3, stride),
            nn.ReLU(),
            _convolution(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


def network(blocks: Sequence[int], width: int) -> nn.Sequential:
    """Return the network; with blocks (3, 4, 6, 3) and width 64, it is ResNet-50."""
    stages: list[nn.Module] = []
    inputs = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage and not number else 1
            stages.append(Bottleneck(inputs, width << stage, stride))
            inputs = EXPANSION * (width << stage)
    first = [_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(
        *first, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)
    )


class Classify(vcasgd.Task):
    mixed_precision = "bf16"

    def __init__(
        self, folder: str, blocks: Sequence[int], width: int, batch: int, loaders: int
    ) -> None:
        self.folder, self.blocks, self.width = Path(folder), blocks, width
        self.batch_size, self.loader_workers = batch, loaders

    def model(self) -> nn.Module:
        return network(self.blocks, self.width)

    def dataset(self, split: str) -> Photos:  # noqa: ARG002 - one split
        return Photos(self.folder)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        pixels, labels = batch
        return functional.cross_entropy(model(pixels.float() / 255), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        count = torch.tensor(len(batch[1]))
        return {"loss": self.loss(model, batch) * count, "count": count}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
