"""A task that reads its data from a folder of the machine."""

import os
import time
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from traced import Traced


class Files(Dataset[int]):
    """The numbers that the files of the folder contain, in the order of their names."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return int(self.paths[index].read_text())


class Local(Traced):
    """Task with the data of the folder that ``DATA`` names.

    It is read once no file has its name and the suffix ``late``.
    """

    def dataset(self, split: str) -> Dataset[Any]:
        folder = Path(os.environ["DATA"])
        while folder.with_suffix(".late").exists():
            time.sleep(0.02)
        return Files(folder) if split == "train" else super().dataset(split)
