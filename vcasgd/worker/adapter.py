"""Adapters of the PEFT library: what its own format needs besides the tensors."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vcasgd.learning.base import buffers_of, parameters_of


@dataclass(frozen=True)
class Adapter:
    """An adapter's ``config``, the content of ``adapter_config.json``, and its ``tensors``.

    ``tensors`` has the name in the model for each name in ``adapter_model.safetensors``.
    """

    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"config": self.config, "tensors": self.tensors}, sort_keys=True)


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the active adapter of the PEFT model that ``module`` is or contains.

    None if there is none, if several are active, or if it has tensors that training doesn't change.
    """
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel, get_peft_model_state_dict

    model = next((each for each in module.modules() if isinstance(each, PeftModel)), None)
    if model is None or not isinstance(model.active_adapter, str):
        return None
    names = {_place(each): name for name, each in _trained(module).items()}
    state = get_peft_model_state_dict(
        model, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    tensors = {saved: names.get(_place(each), "") for saved, each in state.items()}
    if not all(tensors.values()):
        return None
    return Adapter(_config_of(model), tensors)


def _trained(module: nn.Module) -> dict[str, Tensor]:
    parameters = {name: each for name, each in parameters_of(module).items() if each.requires_grad}
    return {**buffers_of(module), **parameters}


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


def _config_of(model: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config[model.active_adapter].save_pretrained(folder)
        config: dict[str, Any] = json.loads(Path(folder, "adapter_config.json").read_text())
    # As PeftModel.save_pretrained does.
    config["inference_mode"] = True
    base = config.get("base_model_name_or_path")
    # A path of this machine means nothing on others.
    if base is None or Path(base).is_absolute():
        config["base_model_name_or_path"] = None
    return config
