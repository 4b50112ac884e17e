"""MNIST: handwritten digits of 28×28 pixels, 60,000 for training and 10,000 for validation."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

import vcasgd

Batch = tuple[Tensor, Tensor]  # images float32 [n, 1, 28, 28], labels int64 [n]

#: Mean and standard deviation of the training pixels in 0…1.
MEAN, DEVIATION = 0.1307, 0.3081
URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"


class Mnist(vcasgd.Task):
    """A small convolutional network, fast without a GPU.

    ``data`` is an ``.npz`` with uint8 arrays x_train, y_train, x_test, and y_test, or a folder
    with the original files, compressed or not, as torchvision stores them. A relative path is
    relative to the folder of this file, which is part of the package.
    """

    batch_size = 64

    def __init__(self, data: str = "data/mnist.npz", learning_rate: float = 0.05) -> None:
        self.data = Path(__file__).parent / data
        self.learning_rate = learning_rate

    def model(self) -> nn.Module:
        return nn.Sequential(
            *_block(1, 16, kernel=5),  # to 14×14
            *_block(16, 32, kernel=3),  # to 7×7
            *_block(32, 64, kernel=3),  # to 4×4
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )

    def dataset(self, split: str) -> Dataset[Batch]:
        return Images(*load(self.data, "train" if split == "train" else "test"))

    def collate(self, samples: Any) -> Any:
        return samples  # Images returns whole batches.

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, nesterov=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        scores = model(images)
        return {
            "loss": F.cross_entropy(scores, labels, reduction="sum"),
            "accuracy": (scores.argmax(1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }


class Images(Dataset[Batch]):
    """All images in memory as bytes, a quarter of the size of float32.

    Each batch is normalized when it is read.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
        self.images = torch.from_numpy(images).view(-1, 1, 28, 28)
        self.labels = torch.from_numpy(labels).to(torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        images = self.images[indices].to(torch.float32).div_(255)
        return images.sub_(MEAN).div_(DEVIATION), self.labels[indices]


def load(path: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return images ``[n, 28, 28]`` and labels ``[n]`` of ``"train"`` or ``"test"``."""
    if path.is_file():
        with np.load(path) as arrays:
            return arrays[f"x_{part}"], arrays[f"y_{part}"]
    stem = "train" if part == "train" else "t10k"
    return _original(path, f"{stem}-images*"), _original(path, f"{stem}-labels*")


def _original(folder: Path, pattern: str) -> NDArray[np.uint8]:
    """Read an array in the IDX format of the original files."""
    files = [file for file in sorted(folder.rglob(pattern)) if file.is_file()]
    if not files:
        raise FileNotFoundError(
            f"no MNIST at {folder}; before you submit the job, type beside train.py\n"
            f"  curl -L --create-dirs -o data/mnist.npz {URL}\n"
            "or set the argument `data` to a path that every worker has"
        )
    raw = files[0].read_bytes()
    content = gzip.decompress(raw) if files[0].suffix == ".gz" else raw
    dimensions = content[3]  # A big-endian length for each dimension follows, then the bytes.
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def _block(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    """Return a block that halves height and width by a stride, which is cheaper than pooling."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
