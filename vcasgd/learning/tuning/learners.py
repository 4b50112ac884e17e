"""Number of learners on a machine.

A machine gets another learner as long as that raises its throughput by more than a tenth, and
loses one that does not (CROSSBOW, Koliousis 2019, arXiv 1901.02244, section 4.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

#: An additional learner must multiply the throughput of its machine by more than this.
GAIN = 1.1
#: Share of the memory of a machine and of its GPU that stays free, for peaks of the data's needs
#: and for the start of another learner.
RESERVE = 0.1


@dataclass(frozen=True)
class Load:
    """Measurements of one machine.

    ``rate``: local steps per second of all its learners. ``room``: further learners that fit into
    its memory; negative if there are too many. ``cores``: its processor cores.
    """

    rate: float
    room: int
    cores: int


@dataclass(frozen=True)
class Trial:
    """State of the search on one machine.

    ``learners`` is the current number. ``rates`` are the measured steps per second by number of
    learners. No higher number is tried before ``closed_until`` (Unix seconds).
    """

    learners: int = 1
    rates: Mapping[int, float] = field(default_factory=dict)
    closed_until: float = 0.0


def next_trial(trial: Trial, load: Load, most: int, now: float, rest: float) -> Trial:
    """Return the trial that follows a measurement with ``trial.learners``.

    ``most``: learners that the job allows on a machine. ``rest``: seconds before a number that did
    not help is tried again.
    """
    count, rates = trial.learners, {**trial.rates, trial.learners: load.rate}
    before = rates.get(count - 1)
    most = max(1, min(most, load.cores, count + load.room))
    if count > most or (before is not None and load.rate <= GAIN * before):
        return fewer(replace(trial, rates=rates), now, rest)
    if count < most and now >= trial.closed_until:
        return Trial(count + 1, {count: load.rate})
    return replace(trial, rates=rates)


def fewer(trial: Trial, now: float, rest: float) -> Trial:
    """Return a trial with one learner less, at least 1, that tries no more for ``rest`` seconds."""
    count = max(1, trial.learners - 1)
    rates = {learners: rate for learners, rate in trial.rates.items() if learners <= count}
    return Trial(count, rates, now + rest)


def room_for(available: float, total: float, own: float) -> int:
    """Return how many more learners of ``own`` bytes fit into a memory of ``total`` bytes.

    ``available``: free bytes of the memory.
    """
    return int((available - RESERVE * total) // max(own, 1.0))
