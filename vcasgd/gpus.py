"""GPUs of this machine, as NVIDIA's management library reports them; the only importer of pynvml.

A machine without a GPU or a driver has none. Nothing here starts CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Peak of a card in bfloat16 (T4, V100: float16) without sparsity, in 10¹² operations per second,
#: by a part of its name, as in NVIDIA's data sheets.
_PEAKS = {
    "B200": 2250,
    "B100": 1750,
    "H200": 989,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "A100": 312,
    "A40": 149.7,
    "A30": 165,
    "A10": 125,
    "A10G": 70,
    "L40": 181,
    "L40S": 362,
    "L4": 121,
    "T4": 65,
    "V100": 125,
    "RTX 3090": 71,
    "RTX 4090": 165,
    "RTX A6000": 154.8,
}


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


def visible_gpus() -> list[Gpu]:
    """Return the GPUs in ``CUDA_VISIBLE_DEVICES``, in its order; all of them if it isn't set."""
    nvml = _library(os.getpid())
    return [] if nvml is None else list(_visible(nvml, os.environ.get(VISIBLE)))


def peak_flops(name: str) -> float | None:
    """Return the operations per second that a card can do in 16 bits; None for an unknown one."""
    known = [part for part in _PEAKS if f" {part} " in f" {name} ".replace("-", " ")]
    return _PEAKS[max(known, key=len)] * 1e12 if known else None


def _visible(nvml: Any, listed: str | None) -> Iterator[Gpu]:
    if listed is None:
        names = list(map(str, range(nvml.nvmlDeviceGetCount())))
    else:
        names = [name.strip() for name in listed.split(",")]
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
