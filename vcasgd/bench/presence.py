"""When machines are there: for ever, or as a recorded history of spot machines tells."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcasgd.errors import SpecError


@dataclass(frozen=True)
class Life:
    """A machine from ``start`` to ``stop``, in seconds; infinity where it is never taken."""

    start: float
    stop: float


def always(machines: int) -> list[Life]:
    """All from the beginning, and none is ever taken."""
    return [Life(0.0, math.inf)] * machines


def machines(workers: int, trace: Path | None, faster: float, seed: int) -> list[Life]:
    """So many machines: for ever, or at most, as a ``trace`` tells that goes by so many times
    ``faster`` than it was recorded. Raises :class:`SpecError`."""
    if trace is None:
        return always(workers)
    counts, gap = read_counts(trace, workers)
    return lives(counts, gap / faster, seed)


def lives(counts: Sequence[int], gap: float, seed: int) -> list[Life]:
    """Machines whose number is ``counts``, each for ``gap`` seconds, over and over.

    Which of them go is drawn, seeded. A history that ends begins again.
    """
    chance = random.Random(seed)
    alive: list[float] = []
    found: list[Life] = []
    for nth, count in enumerate(counts):
        now = nth * gap
        while len(alive) > count:
            found.append(Life(alive.pop(chance.randrange(len(alive))), now))
        alive += [now] * (count - len(alive))
    return sorted(
        [*found, *(Life(start, len(counts) * gap) for start in alive)],
        key=lambda life: (life.start, life.stop),
    )


def read_counts(path: Path, most: int) -> tuple[list[int], float]:
    """The number of machines over time, at most ``most``, and the seconds between two numbers.

    The file is JSON, ``{"metadata": {"gap_seconds": 300}, "data": [4, 4, 2, …]}``. Raises
    :class:`SpecError`.
    """
    try:
        content = json.loads(path.read_text())
        gap = float(content["metadata"]["gap_seconds"])
        counts = [min(int(count), most) for count in content["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"trace: {path} can't be read: {error!r}", field="trace") from error
    if not counts or not max(counts) or not gap > 0:
        raise SpecError(f"trace: {path} has no machine at any time", field="trace")
    return counts, gap
