"""Decisions of self-tuning: pure functions of measurements and of the current settings.

``intervals``  local steps between two pushes of each worker, by its speed
``momentum``   momentum of the optimizers, reduced by the momentum that asynchrony adds
``mixing``     weight of updates while validation worsens
``learners``   number of learners on a machine

No decision changes for a small difference: each stays until measurements differ by more than
their usual noise.
"""

from vcasgd.learning.tuning.intervals import local_steps, shares_by_speed
from vcasgd.learning.tuning.learners import Load, Trial, fewer, next_trial, room_for
from vcasgd.learning.tuning.mixing import factor_after
from vcasgd.learning.tuning.momentum import (
    Momenta,
    explicit_momentum,
    implicit_momentum,
    smoothed_momentum,
)

__all__ = [
    "Load",
    "Momenta",
    "Trial",
    "explicit_momentum",
    "factor_after",
    "fewer",
    "implicit_momentum",
    "local_steps",
    "next_trial",
    "room_for",
    "shares_by_speed",
    "smoothed_momentum",
]
