"""Lifetimes of simulated machines: unlimited, or from a recorded history of spot machines."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcasgd.errors import SpecError

#: Seconds until a market that refused is asked again: at first, and at most after doublings. Those
#: of the controller.
RETRY_SECONDS = (1.0, 300.0)


@dataclass(frozen=True)
class Life:
    """Lifetime of a machine in seconds; ``stop`` is infinite if it is never evicted."""

    start: float
    stop: float


def always(machines: int) -> list[Life]:
    """Return machines that start at 0 and are never evicted."""
    return [Life(0.0, math.inf)] * machines


def machines(
    workers: int,
    trace: Path | None,
    faster: float,
    seed: int,
    retry: tuple[float, float] | None = None,
) -> list[Life]:
    """Return the lifetimes of ``workers`` machines, or of at most as many from a ``trace``.

    ``faster`` divides all times; for ``retry`` see :func:`lives`. Raises :class:`SpecError` for an
    invalid trace.
    """
    if trace is None:
        return always(workers)
    counts, gap = read_counts(trace, workers)
    waits = None if retry is None else (retry[0] / faster, retry[1] / faster)
    return lives(counts, gap / faster, seed, waits)


def lives(
    counts: Sequence[int], gap: float, seed: int, retry: tuple[float, float] | None = None
) -> list[Life]:
    """Return lifetimes such that ``counts[n]`` machines run in the nth interval of ``gap`` seconds.

    The evicted machines are drawn with ``seed``. All machines stop at the end of the counts. With
    ``retry``, machines that are for sale again are bought at the next attempt: after these seconds
    at first, twice as many after each refusal, and at most the second number.
    """
    rng = random.Random(seed)
    alive: list[float] = []
    ended: list[Life] = []
    refused: float | None = None
    for nth, count in enumerate(counts):
        now = nth * gap
        while len(alive) > count:
            ended.append(Life(alive.pop(rng.randrange(len(alive))), now))
        if count > len(alive):
            bought = now if retry is None or refused is None else _attempt(refused, now, *retry)
            alive += [bought] * (count - len(alive))
            refused = bought
        refused = None if count == max(counts) else now if refused is None else refused
    stop = len(counts) * gap
    ended += [Life(start, stop) for start in alive]
    # What was lost before its purchase never existed.
    existed = [life for life in ended if life.start < life.stop]
    return sorted(existed, key=lambda life: (life.start, life.stop))


def _attempt(refused: float, now: float, wait: float, most: float) -> float:
    """Return the time of the first attempt from ``now`` on of those since the first refusal."""
    while refused < now:
        refused, wait = refused + wait, min(2 * wait, most)
    return refused


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
