"""Stands in for pynvml on machines without a GPU: cards of the variable ``FAKE_GPUS``.

Its value is a JSON list of objects with ``uuid``, ``name``, ``total``, ``free``, and, if the card
reports it, ``utilization``. Without the variable, there is no driver.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in the real library."""


_cards: list[dict[str, Any]] = []


def nvmlInit() -> None:  # noqa: N802 - as in the real library, here and below
    if "FAKE_GPUS" not in os.environ:
        raise NVMLError("Driver Not Loaded")
    _cards[:] = json.loads(os.environ["FAKE_GPUS"])


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_cards)


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:  # noqa: N802
    if index >= len(_cards):
        raise NVMLError("Invalid Argument")
    return _cards[index]


def nvmlDeviceGetHandleByUUID(uuid: str) -> dict[str, Any]:  # noqa: N802
    for card in _cards:
        if card["uuid"] == uuid:
            return card
    raise NVMLError("Not Found")


def nvmlDeviceGetUUID(handle: dict[str, Any]) -> str:  # noqa: N802
    return str(handle["uuid"])


def nvmlDeviceGetName(handle: dict[str, Any]) -> str:  # noqa: N802
    return str(handle["name"])


def nvmlDeviceGetMemoryInfo(handle: dict[str, Any]) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(total=handle["total"], free=handle["free"])


def nvmlDeviceGetUtilizationRates(handle: dict[str, Any]) -> SimpleNamespace:  # noqa: N802
    if "utilization" not in handle:
        raise NVMLError("Not Supported")
    return SimpleNamespace(gpu=handle["utilization"], memory=0)
