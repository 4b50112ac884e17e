"""What a machine has, as its workers tell the controller: memory, also of a GPU, and processors."""

from __future__ import annotations

import os

import psutil
import torch


def capacity() -> dict[str, int]:
    """In bytes; of the GPU only once this process uses one."""
    memory = psutil.virtual_memory()
    found = {
        "resident_bytes": psutil.Process().memory_info().rss,
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "cores": os.cpu_count() or 1,
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info()
        found |= {"gpu_memory_bytes": total, "gpu_memory_free_bytes": free}
    return found
