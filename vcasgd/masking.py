"""Values that this process must not show: they are replaced in its output."""

from __future__ import annotations

from collections.abc import Iterable

#: What is shown instead.
MASK = "***"
#: Characters of the shortest value that is replaced. Shorter ones would change ordinary text.
SHORTEST = 6

_values: tuple[str, ...] = ()


def hide(values: Iterable[str]) -> None:
    """Replace values, and each line of values with several lines, in all further output."""
    global _values
    parts = {part.strip() for value in values for part in (value, *value.splitlines())}
    known = {part for part in parts if len(part) >= SHORTEST}.union(_values)
    # A value may contain another one.
    _values = tuple(sorted(known, key=lambda value: (-len(value), value)))


def masked(text: str) -> str:
    """Return a text without hidden values."""
    for value in _values:
        text = text.replace(value, MASK)
    return text
