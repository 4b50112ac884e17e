"""Plain data of a bounded size: what JSON can express without loss."""

from __future__ import annotations

from math import isfinite
from typing import Any

from pydantic import BaseModel, SecretStr

from vcasgd.limits import MAX_DEPTH, MAX_DIGITS, MAX_TEXT, MAX_VALUES

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
