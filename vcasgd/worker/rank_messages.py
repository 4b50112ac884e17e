"""Messages between the ranks of a worker, over a pair of connected sockets.

All ranks run the same user's code with the same rights, so they trust one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcasgd.errors import VcasgdError
from vcasgd.learning.batch_source import SampleRange


@dataclass(frozen=True)
class StartRank:
    """First message to a rank: what it trains, and where it meets the others.

    ``floats`` is the length of the vector in the shared memory.
    """

    rank: int
    size: int
    spec: dict[str, Any]
    facts: dict[str, Any]
    code: Path
    base: Path | None
    meeting: Path
    timeout: float
    threads: int
    floats: int


@dataclass(frozen=True)
class LoadModel:
    """LoadModel the vector in the shared memory, and these integers."""

    integers: bytes


@dataclass(frozen=True)
class ShiftModel:
    """Add parts of the vector in the shared memory, ``[start, stop)`` each, to the model."""

    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankInterval:
    """Train samples together.

    ``batch`` is the mean size of the machine's local batch, ``following`` what is probably trained
    next. ``optimizer`` is the state of a new optimizer, empty if it has none yet; None if all
    continue with theirs.
    """

    samples: SampleRange
    following: tuple[SampleRange, ...]
    batch: float | None
    asynchrony: float
    divergences: int
    optimizer: bytes | None


@dataclass(frozen=True)
class StepMade:
    """The first rank has made its step; ``stop`` ends the interval."""

    stop: bool


@dataclass(frozen=True)
class RankReady:
    """Answer to :class:`StartRank`, :class:`LoadModel`, and :class:`ShiftModel`."""


@dataclass(frozen=True)
class RankPart:
    """Answer to :class:`RankInterval`: what this rank did, and a sum over its model."""

    samples: int
    loss_sum: float
    checksum: float


@dataclass(frozen=True)
class RankFailed:
    """The rank ends after an error."""

    error: VcasgdError
