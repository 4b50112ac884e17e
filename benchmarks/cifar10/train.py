"""CIFAR-10 task: 50,000 small color pictures of ten classes to train on, 10,000 to validate.

Uses a residual network for 32×32 pictures (He 2015, arXiv 1512.03385, section 4.2) of depth 6n + 2,
with the usual augmentation: a random crop of the picture padded by 4, and a flip.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd

Batch = tuple[Tensor, Tensor]  # pictures float32 [n, 3, 32, 32], labels int64 [n]

MEAN = torch.tensor([0.4914, 0.4822, 0.4465])
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616])


class Cifar10(vcasgd.Task):
    """CIFAR-10 with a ResNet.

    The learning rate rises linearly during the fraction ``warm_up`` of the job, and then falls to
    0 along a cosine (Loshchilov 2016, arXiv 1608.03983). ``pixels`` is 32, or 16 to search for
    settings in less time. ``compiled`` uses torch.compile, which needs a C++ compiler.
    """

    evaluation_batch_size = 1000

    def __init__(
        self,
        data: str = "data/cifar10.npz",
        depth: int = 8,
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        warm_up: float = 0.0,
        batch_size: int = 64,
        pixels: int = 32,
        autocast: bool = True,
        compiled: bool = False,
    ) -> None:
        self.data = str(Path(__file__).parent / data)
        self.depth = depth
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.warm_up = warm_up
        self.batch_size = batch_size
        self.pixels = pixels
        self.compiled = compiled
        self.autocast = autocast

    def model(self) -> nn.Module:
        model = ResNet(self.depth).to(memory_format=torch.channels_last)
        if self.compiled:
            model.compile()
        return model

    def dataset(self, split: str) -> Dataset[Batch]:
        part = "train" if split == "train" else "test"
        return Pictures(*load(self.data, part, self.pixels), self.pixels, split)

    def collate(self, samples: Any) -> Any:
        return samples  # Pictures returns whole batches.

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.weight_decay,
        )

    def schedule(self, progress: float) -> float:
        if progress < self.warm_up:
            return progress / self.warm_up
        return (1 + math.cos(math.pi * (progress - self.warm_up) / (1 - self.warm_up))) / 2

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pictures, labels = batch
        return F.cross_entropy(self._scores(model, pictures), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        pictures, labels = batch
        scores = self._scores(model, pictures)
        return {
            "loss": F.cross_entropy(scores, labels, reduction="sum"),
            "accuracy": (scores.argmax(1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }

    def _scores(self, model: nn.Module, pictures: Tensor) -> Tensor:
        with torch.autocast(pictures.device.type, torch.bfloat16, enabled=self.autocast):
            scores: Tensor = model(pictures)
        return scores.float()


class ResNet(nn.Module):
    """Residual network with three stages of n = (depth − 2)/6 blocks.

    The stages have 16, 32 and 64 channels; shortcuts have no parameters (option A of the paper).
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.first = _convolution(3, 16, 1)
        self.normal = nn.BatchNorm2d(16)
        stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.blocks = nn.Sequential(
            *(
                Block(inputs if nth == 0 else outputs, outputs, stride if nth == 0 else 1)
                for inputs, outputs, stride in stages
                for nth in range(blocks)
            )
        )
        self.last = nn.Linear(64, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        x = F.relu(self.normal(self.first(pictures)))
        scores: Tensor = self.last(self.blocks(x).mean((2, 3)))
        return scores


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.more = stride, outputs - inputs
        self.first, self.second = (
            _convolution(inputs, outputs, stride),
            _convolution(outputs, outputs, 1),
        )
        self.normal_1, self.normal_2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.normal_1(self.first(x)))
        y = self.normal_2(self.second(y))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(x + y)


def _convolution(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class Pictures(Dataset[Batch]):
    """Data set with all pictures in memory as bytes.

    Batches are normalized on access. Those of the training split are randomly cropped and flipped
    with torch's generator.
    """

    def __init__(self, pictures: Tensor, labels: Tensor, pixels: int, split: str) -> None:
        self.pictures, self.labels = pictures, labels
        self.pixels, self.augment = pixels, split == "train"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices)
        border = self.pixels // 8
        places = torch.arange(self.pixels).expand(len(chosen), self.pixels)
        rows = columns = places + border
        if self.augment:
            rows = places + torch.randint(2 * border + 1, (len(chosen), 1))
            columns = places + torch.randint(2 * border + 1, (len(chosen), 1))
            flipped = torch.rand(len(chosen), 1) < 0.5
            columns = torch.where(flipped, columns.flip(1), columns)
        pixels = self.pictures[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        # Channels are last in memory already.
        normal = pixels.to(torch.float32).div_(255).sub_(MEAN).div_(DEVIATION).permute(0, 3, 1, 2)
        return normal, self.labels[chosen]


@lru_cache(maxsize=2)
def load(path: str, part: str, pixels: int) -> tuple[Tensor, Tensor]:
    """Load pictures and labels of ``"train"`` or ``"test"``.

    Pictures are uint8 ``[n, 40, 40, 3]``, padded by 4 with the mean color; if ``pixels`` is 16,
    half of that. Labels are int64 ``[n]``.
    """
    with np.load(path) as arrays:
        pictures, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    padded = np.empty((len(pictures), 40, 40, 3), np.uint8)
    padded[:] = (MEAN * 255).round().to(torch.uint8).numpy()
    padded[:, 4:36, 4:36] = pictures
    images = torch.from_numpy(padded)
    if pixels == 16:
        pooled = F.avg_pool2d(images.permute(0, 3, 1, 2).float(), 2).round()
        images = pooled.to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return images, torch.from_numpy(labels.astype(np.int64))
