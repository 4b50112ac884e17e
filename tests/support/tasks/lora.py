"""LoRA on a transformer of 124 million parameters with random weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import vcasgd


class Lora(vcasgd.Task):
    """Language model on ``samples`` sequences of 8 tokens. The base has the type ``dtype``."""

    batch_size = 2

    def __init__(self, samples: int = 8, layers: int = 12, dtype: str = "float32") -> None:
        self.samples, self.layers, self.dtype = samples, layers, dtype

    def model(self) -> nn.Module:
        network = GPT2LMHeadModel(GPT2Config(n_layer=self.layers))
        network.to(getattr(torch, self.dtype))
        lora = LoraConfig(
            r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        )
        return get_peft_model(network, lora)

    def dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(len(split))
        return TensorDataset(torch.randint(50_000, (self.samples, 8), generator=generator))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (tokens,) = batch
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        count = torch.tensor(len(batch[0]))
        return {"loss": self.loss(model, batch) * count, "count": count}
