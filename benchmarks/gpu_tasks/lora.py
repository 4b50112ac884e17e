"""LoRA on a Llama of Hugging Face with random weights, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from gpt import Windows
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

import vcasgd

VOCABULARY = 32_000


class Lora(vcasgd.Task):
    mixed_precision = "bf16"
    clip_norm = 1.0

    def __init__(self, layers: int, width: int, context: int = 512, batch: int = 16) -> None:
        self.layers, self.width, self.context, self.batch_size = layers, width, context, batch

    def model(self) -> nn.Module:
        shape = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=self.width * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 64,
            max_position_embeddings=self.context,
        )
        adapter = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        adapted: nn.Module = get_peft_model(LlamaForCausalLM(shape), adapter)
        return adapted

    def dataset(self, split: str) -> Windows:  # noqa: ARG002 - one split
        return Windows(VOCABULARY, self.context)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, _ = batch
        loss: Tensor = model(input_ids=inputs, labels=inputs).loss
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        count = torch.tensor(len(batch[0]))
        return {"loss": self.loss(model, batch) * count, "count": count}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4)
