"""Lifetimes of simulated machines: unlimited, or from a recorded history of spot machines."""

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
    """Lifetime of a machine in seconds; ``stop`` is infinite if it is never evicted."""

    start: float
    stop: float


def always(machines: int) -> list[Life]:
    """Return machines that start at 0 and are never evicted."""
    return [Life(0.0, math.inf)] * machines


def machines(workers: int, trace: Path | None, faster: float, seed: int) -> list[Life]:
    """Return the lifetimes of ``workers`` machines, or of at most as many from a ``trace``.

    ``faster`` divides the times of the trace. Raises :class:`SpecError` for an invalid trace.
    """
    if trace is None:
        return always(workers)
    counts, gap = read_counts(trace, workers)
    return lives(counts, gap / faster, seed)


def lives(counts: Sequence[int], gap: float, seed: int) -> list[Life]:
    """Return lifetimes such that ``counts[n]`` machines run in the nth interval of ``gap`` seconds.

    The evicted machines are drawn with ``seed``. All machines stop at the end of the counts.
    """
    rng = random.Random(seed)
    alive: list[float] = []
    ended: list[Life] = []
    for nth, count in enumerate(counts):
        now = nth * gap
        while len(alive) > count:
            ended.append(Life(alive.pop(rng.randrange(len(alive))), now))
        alive += [now] * (count - len(alive))
    return sorted(
        [*ended, *(Life(start, len(counts) * gap) for start in alive)],
        key=lambda life: (life.start, life.stop),
    )


def read_counts(path: Path, most: int) -> tuple[list[int], float]:
    """Read the number of machines over time, capped at ``most``, and the interval in seconds.

    The file is JSON, ``{"metadata": {"gap_seconds": 300}, "data": [4, 4, 2, …]}``. Raises
    :class:`SpecError` if it is not.
    """
    try:
        content = json.loads(path.read_text())
        gap = float(content["metadata"]["gap_seconds"])
        counts = [min(int(count), most) for count in content["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"trace: {path} can't be read: {error!r}", field="trace") from error
    if not counts or not max(counts) or not gap > 0:
        raise SpecError(f"trace: {path} contains no machines", field="trace")
    return counts, gap
