"""Launches of a script, and settings of Accelerate."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from vcasgd.errors import SpecError

#: Ways to run an ``Accelerator`` that shard a model, and their names.
_SHARDED = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM"}


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
    if _has_accelerator():
        _check_accelerator()


def accumulation_steps() -> int:
    """Return the number of batches whose gradients Accelerate accumulates; 1 without it."""
    if not _has_accelerator():
        return 1
    from accelerate.state import GradientState

    return int(GradientState().num_steps)


def seen_by_accelerate(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a loader while Accelerate follows its ``end_of_dataloader``.

    ``Accelerator.accumulate`` ends a step there, as at the end of a loader of its own.
    """
    if not _has_accelerator():
        yield from batches
        return
    from accelerate.state import GradientState

    state = GradientState()
    try:
        for batch in batches:
            # Again for each: simulated workers share the state.
            state._remove_dataloader(loader)
            state._add_dataloader(loader)
            yield batch
    finally:
        state._remove_dataloader(loader)


def _has_accelerator() -> bool:
    # An Accelerator is used only if the script has imported it.
    module = sys.modules.get("accelerate.state")
    return module is not None and bool(module.AcceleratorState._shared_state)


def _check_accelerator() -> None:
    from accelerate.state import AcceleratorState, GradientState

    state: Any = AcceleratorState()
    kind = state.distributed_type.value
    if kind in _SHARDED:
        why = "it shards a model over processes that wait for each other"
        raise _refused(kind, why, f"run `accelerate config` without {_SHARDED[kind]}")
    if accumulation_steps() > 1 and not GradientState().sync_with_dataloader:
        raise _refused(
            "sync_with_dataloader=False",
            "workers share a batch, so its parts vary in number, and each step ends with the last",
            "leave it out of GradientAccumulationPlugin",
        )


def _refused(what: str, why: str, remedy: str) -> SpecError:
    return SpecError(
        f"task: session.loader can't be used with {what}: {why}", remedy=remedy, field="task"
    )
