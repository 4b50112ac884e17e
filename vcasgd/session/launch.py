"""Refusal of launches that a job can't follow: several processes, and settings of Accelerate."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from vcasgd.errors import SpecError

_SHARDED = "it shards a model over processes that wait for each other"
#: Ways to run an ``Accelerator`` that a job can't follow: why, and what to do.
_REFUSED = {
    "DEEPSPEED": (_SHARDED, "run `accelerate config` without DeepSpeed"),
    "FSDP": (_SHARDED, "run `accelerate config` without FSDP"),
    "MEGATRON_LM": (_SHARDED, "run `accelerate config` without Megatron-LM"),
}


def check_launch() -> None:
    """Raise :class:`SpecError` if this process was launched in a way that a job can't follow."""
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        launched = max(launched, torch.distributed.get_world_size())
    if launched > 1:
        raise _refused(
            f"a launch of {launched} processes",
            "each worker of a job is one process, and none waits for another",
            "run the script with python, and set workers.max in job.yaml",
        )
    # An Accelerator is used only if the script has imported it.
    if "accelerate.state" in sys.modules:
        _check_accelerator()


def _check_accelerator() -> None:
    from accelerate.state import AcceleratorState, GradientState

    if not AcceleratorState._shared_state:
        return
    state: Any = AcceleratorState()
    kind = state.distributed_type.value
    if kind in _REFUSED:
        why, remedy = _REFUSED[kind]
        raise _refused(kind, why, remedy)
    if state.mixed_precision == "fp16":
        raise _refused(
            "fp16", "its scaler of gradients skips steps", 'use Accelerator(mixed_precision="bf16")'
        )
    steps = GradientState().num_steps
    if steps > 1:
        raise _refused(
            "gradient accumulation",
            "each batch needs its step, because a push can follow it",
            f"multiply the batch size by {steps}; workers share each batch. To save memory, use "
            "session.batches with gradient_accumulation_steps",
        )


def _refused(what: str, why: str, remedy: str) -> SpecError:
    return SpecError(
        f"task: session.loader can't be used with {what}: {why}", remedy=remedy, field="task"
    )
