"""GPUs of this machine, as NVIDIA's management library reports them; the only importer of pynvml.

A machine without a GPU or a driver has none. Nothing here starts CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """A GPU. ``utilization`` is the percentage of the last moments in which it computed.

    It is None for a card that doesn't report it.
    """

    uuid: str
    name: str
    memory_bytes: int
    memory_free_bytes: int
    utilization: float | None


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs in ``CUDA_VISIBLE_DEVICES``, in its order; all of them if it isn't set."""
    nvml = _library(os.getpid())
    return [] if nvml is None else list(_visible(nvml, environment.get(VISIBLE)))


def _visible(nvml: Any, listed: str | None) -> Iterator[Gpu]:
    names = _all(nvml) if listed is None else [name.strip() for name in listed.split(",")]
    for name in names:
        try:
            handle = _handle(nvml, name)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield Gpu(
                uuid=nvml.nvmlDeviceGetUUID(handle),
                name=nvml.nvmlDeviceGetName(handle),
                memory_bytes=memory.total,
                memory_free_bytes=memory.free,
                utilization=_utilization(nvml, handle),
            )
        except nvml.NVMLError:
            # As CUDA does: an entry that is no GPU hides those behind it.
            return


def _all(nvml: Any) -> list[str]:
    return [str(number) for number in range(nvml.nvmlDeviceGetCount())]


def _handle(nvml: Any, name: str) -> Any:
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _utilization(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        return None


@cache
def _library(_pid: int) -> Any:
    """Return the library, which each process initializes for itself, or None without a driver."""
    try:
        import pynvml
    except ImportError:
        # Figures for people are no reason not to train; the doctor names missing packages.
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
