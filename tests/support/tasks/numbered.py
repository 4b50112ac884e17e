"""The traced task over data that is drawn by a sampler, or can only be iterated over."""

from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset as Table
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, WeightedRandomSampler, get_worker_info
from traced import Traced


class Parts(IterableDataset[int]):
    """Shuffled indices, of which each shard has a part."""

    num_shards = 3

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        part = torch.arange(first, self.samples, step)
        return iter(part[torch.randperm(len(part))].tolist())


class Iterable(Traced):
    def dataset(self, split: str) -> Dataset[int]:
        return Parts(self.samples) if split == "train" else super().dataset(split)


class HuggingFace(Traced):
    def dataset(self, split: str) -> Any:
        if split != "train":
            return super().dataset(split)
        table = Table.from_dict({"index": list(range(self.samples))})
        return table.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=20)

    def collate(self, samples: list[Any]) -> Tensor:
        return torch.tensor([each["index"] if isinstance(each, dict) else each for each in samples])


class Weighted(Traced):
    def sampler(self, dataset: Dataset[int]) -> WeightedRandomSampler:
        return WeightedRandomSampler(torch.arange(self.samples) + 1.0, self.samples)
