"""Base class and types of everything that people write: strict models, durations, plain data."""

from __future__ import annotations

import math
import re
from datetime import date, datetime, timedelta
from math import isfinite
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SecretStr,
    WithJsonSchema,
)

from vcasgd.limits import MAX_DEPTH, MAX_DIGITS, MAX_TEXT, MAX_VALUES


class StrictModel(BaseModel):
    """Immutable model that rejects unknown fields and infinite or NaN numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


#: Descriptions of patterns, which error messages show instead of the regular expressions.
PATTERNS: dict[str, str] = {}


def described(pattern: str, words: str) -> str:
    """Return a pattern whose errors say that the text must be ``words``."""
    PATTERNS[pattern] = words
    return pattern


#: Pattern of the SHA-256 of a file.
DIGEST_PATTERN = described(r"^[0-9a-f]{64}$", "a SHA-256: 64 digits from 0 to 9 and a to f")

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


def parse_moment(value: object) -> datetime:
    """Parse a time such as ``2026-12-01T08:00+01:00``, or a day, which is its start.

    Without an offset, it is in the time zone of this computer. Raises :class:`ValueError`.
    """
    text = value.isoformat() if isinstance(value, date) else value  # YAML reads days and times
    try:
        if isinstance(text, str):
            at = datetime.fromisoformat(text.strip())
            return at if at.tzinfo else at.astimezone()
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"must be a time such as 2026-12-01T08:00; not {value!r}")


Moment = Annotated[
    datetime,
    BeforeValidator(parse_moment),
    PlainSerializer(lambda value: value.isoformat(), return_type=str),
    WithJsonSchema({"type": "string", "examples": ["2026-12-01T08:00"]}, mode="validation"),
]

_GB = {
    "M": 1e-3, "G": 1.0, "T": 1e3, "Mi": 2**20 / 1e9, "Gi": 2**30 / 1e9, "Ti": 2**40 / 1e9,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([MGT]i?)B?\s*", re.IGNORECASE)


def parse_size(value: object) -> float:
    """Parse a size of memory such as ``16GB`` or ``512MiB``, in GB (10⁹ bytes).

    Raises :class:`ValueError`.
    """
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or not (size := round(float(match[1]) * _GB[match[2].capitalize()], 3)):
        raise ValueError(f"must be a size with its unit, for example 16GB or 512MB; not {value!r}")
    return size


#: Memory in GB (10⁹ bytes), written with its unit.
Size = Annotated[
    float,
    BeforeValidator(parse_size),
    PlainSerializer(lambda value: f"{value:.12g}GB", return_type=str),
    WithJsonSchema(
        {"type": "string", "pattern": r"^\d+(\.\d+)? ?[MGT]i?B?$", "examples": ["16GB"]},
        mode="validation",
    ),
]

_TOO_LARGE = 10**MAX_DIGITS


def check_plain(value: Any, level: int = 0, *, finite: bool = True) -> None:
    """Raise ValueError unless ``value``, at a level of its document, is plain and in the limits.

    ``finite``: refuse infinite numbers and NaN, which not every reader of JSON accepts. The time
    is bounded also for data that contains itself, or one part many times.
    """
    values, remaining = 0, [(value, level)]
    while remaining:
        one, level = remaining.pop()
        values += 1
        if values > MAX_VALUES:
            raise ValueError(f"has more than {MAX_VALUES} values")
        if level > MAX_DEPTH:
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
        match one:
            case dict():
                if not all(isinstance(name, str) for name in one):
                    raise ValueError("can have only text as keys; put quotes around them")
                remaining.extend((each, level + 1) for each in (*one, *one.values()))
            case list():
                remaining.extend((each, level + 1) for each in one)
            case BaseModel() | SecretStr():
                pass  # It was checked when it was made. Data from elsewhere has neither.
            case _:
                _check_scalar(one, finite)


def _check_scalar(value: Any, finite: bool) -> None:
    match value:
        case str():
            if len(value) > MAX_TEXT:
                raise ValueError(f"has a text of more than {MAX_TEXT} characters")
            try:
                # No client could read half of a surrogate pair.
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("has a text that is not Unicode") from None
        case int():
            if abs(value) >= _TOO_LARGE:
                raise ValueError(f"has a number of more than {MAX_DIGITS} digits")
        case float():
            if finite and not isfinite(value):
                raise ValueError("has a number that is not finite")
        case None:
            pass
        case _:
            raise ValueError(
                f"can't contain a {type(value).__name__}, only text, numbers, booleans, nulls, "
                "lists, and mappings; put quotes around anything else, such as a date"
            )
