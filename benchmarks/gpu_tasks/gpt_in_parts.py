"""A GPT whose parts are in several processes, on few and short texts."""

from __future__ import annotations

from typing import Any

import torch
from gpt import Gpt
from torch import Tensor
from torch.utils.data import Subset

SAMPLES = 64


class GptInParts(Gpt):
    parallel = "fsdp"

    def dataset(self, split: str) -> Any:
        return Subset(super().dataset(split), range(SAMPLES if split == "train" else 8))

    def evaluate(self, model: Any, batch: Any) -> dict[str, Tensor]:
        count = torch.tensor(len(batch[0]))
        return {"loss": self.loss(model, batch) * count, "count": count}
