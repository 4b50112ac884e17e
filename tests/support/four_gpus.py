"""A worker on a machine whose four GPUs compute as its processors do."""

from __future__ import annotations

import importlib

import torch


def main() -> int:
    torch.cuda.device_count = lambda: 4
    return int(importlib.import_module("vcasgd.worker.main").main())
