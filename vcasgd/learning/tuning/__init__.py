"""What a job may set itself by what is measured while it trains: decisions, and nothing else.

``intervals``  how many local steps each worker makes between two pushes, by its speed
``momentum``   how much of the optimizers' momentum asynchrony takes the place of
``mixing``     how much weight updates have while validation worsens
``learners``   how many learners a machine carries

Each looks at measurements and at what holds now, and says what shall hold. None changes its mind
for a little: what is decided stays until measurements differ by more than they usually do.
"""

from vcasgd.learning.tuning.intervals import local_steps, shares_by_speed
from vcasgd.learning.tuning.learners import Load, Trial, fewer, next_trial, room_for
from vcasgd.learning.tuning.mixing import factor_after
from vcasgd.learning.tuning.momentum import Momenta, explicit, implicit, settled

__all__ = [
    "Load",
    "Momenta",
    "Trial",
    "explicit",
    "factor_after",
    "fewer",
    "implicit",
    "local_steps",
    "next_trial",
    "room_for",
    "settled",
    "shares_by_speed",
]
