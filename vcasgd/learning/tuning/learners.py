"""How many learners a machine carries: one more while that raises what the machine trains by more
than a tenth (CROSSBOW, Koliousis 2019, arXiv 1901.02244, section 4.3), one less where it did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

#: a further learner has to multiply the throughput of its machine by more than this
GAIN = 1.1
#: of a machine's memory, and of its GPU's, that stays free: for what the data needs now and then,
#: and for the next learner's own start
RESERVE = 0.1


@dataclass(frozen=True)
class Load:
    """A machine as it was measured: local steps a second of all its learners together, how many
    more would fit into its memory (below 0: too many are there), and its processors."""

    rate: float
    room: int
    cores: int


@dataclass(frozen=True)
class Trial:
    """``learners`` at work on one machine, and steps a second with so many, as measured since
    something changed. No further one is tried before ``closed_until`` (Unix seconds)."""

    learners: int = 1
    rates: Mapping[int, float] = field(default_factory=dict)
    closed_until: float = 0.0


def next_trial(trial: Trial, load: Load, most: int, now: float, rest: float) -> Trial:
    """What follows from a measurement with ``trial.learners``. ``most``: that the job allows;
    ``rest``: seconds after which it is tried again what did not help."""
    count, rates = trial.learners, {**trial.rates, trial.learners: load.rate}
    before = rates.get(count - 1)
    most = max(1, min(most, load.cores, count + load.room))
    if count > most or (before is not None and load.rate <= GAIN * before):
        return fewer(replace(trial, rates=rates), now, rest)
    if count < most and now >= trial.closed_until:
        return Trial(count + 1, {count: load.rate})
    return replace(trial, rates=rates)


def fewer(trial: Trial, now: float, rest: float) -> Trial:
    """One less, and no further attempt for so many seconds."""
    count = max(1, trial.learners - 1)
    rates = {known: rate for known, rate in trial.rates.items() if known <= count}
    return Trial(count, rates, now + rest)


def room_for(available: float, total: float, own: float) -> int:
    """How many more learners that need as many bytes as this one fit into a memory."""
    return int((available - RESERVE * total) // max(own, 1.0))
