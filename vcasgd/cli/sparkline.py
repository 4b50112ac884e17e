"""A series as one line of text."""

from __future__ import annotations

from collections.abc import Iterable

_BARS = "▁▂▃▄▅▆▇█"
#: fits beside a few words
MOST_BARS = 40


def sparkline(values: Iterable[float], lowest: float | None = None) -> str:
    """A bar for each of the newest values, from ``lowest`` (else the lowest of them) to the
    highest."""
    shown = list(values)[-MOST_BARS:]
    if not shown:
        return ""
    low, high = min(shown) if lowest is None else lowest, max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)
