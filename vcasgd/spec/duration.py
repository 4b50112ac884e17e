"""Durations in job files and pool files: seconds, or a number with a unit."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SCHEMA = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0, "description": "seconds"},
        {"type": "string", "pattern": r"^\d+(\.\d+)?[smhd]?$", "examples": ["5m"]},
    ]
}


def parse_duration(value: object) -> timedelta:
    """Parse a number of seconds, or text such as ``5m``.

    Raises :class:`ValueError` if the value is not a duration, not above 0, or too long for a
    :class:`~datetime.timedelta`.
    """
    try:
        length = value if isinstance(value, timedelta) else timedelta(seconds=_seconds(value))
    except OverflowError as error:
        raise ValueError(f"{value!r} is too long") from error
    if length <= timedelta(0):
        raise ValueError(f"must be longer than 0 seconds; not {value!r}")
    return length


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", value if type(value) is str else "")
    if match is None:
        raise ValueError(
            f"{value!r} is not a duration; write a number of seconds, or for example 30s, 5m, 6h, "
            "or 2d"
        )
    return float(match[1]) * _UNITS[match[2] or "s"]


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(lambda value: value.total_seconds(), return_type=float),
    WithJsonSchema(_SCHEMA, mode="validation"),
]
