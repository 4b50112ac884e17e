"""Judge of repeated updates: how far each is from the right one, and what follows for its owner.

An interval is a function of its base, its samples, and the learner's state before it. Another
machine that repeats it gets the same update, but for the rounding of its hardware. So a single
repetition shows what screening can't (:mod:`vcasgd.verification.screening`): a slight push in one
direction, or a flipped update that is no longer than others. No I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from torch import Tensor

from vcasgd.learning.rules import Payload, make_rule
from vcasgd.spec.job import JobSpec

#: Codecs whose updates depend on no earlier update.
STATELESS = ("float32", "bfloat16")
#: Length of an update's parameters and of its statistics, relative to those of the base, below
#: which differences are rounding: of training in float32, and of values in bfloat16.
MIN_PARAMETERS, MIN_STATISTICS = 1e-4, 0.05
#: Relative difference above which an update is wrong, and above which a state is
#: (docs/adr/0024). What is added to a momentum in each interval adds up.
DIFFERENT, DIFFERENT_STATE = 0.1, 0.02
#: Wrong repetitions of an owner after which it is accused: one may be an accident.
MAX_WRONG = 2
#: Repetitions that an owner's machines left without an answer, after which it is accused unless
#: more of its others were right. A machine is rarely lost in that moment.
MAX_LEFT = 4


def why_not_repeatable(spec: JobSpec) -> str | None:
    """Return why intervals of a job can't be repeated, as far as its specification shows."""
    rule = make_rule(spec.update)
    if rule.payload is not Payload.DELTA or rule.pull < 1:
        return f"updates of the rule {spec.update.rule} are not differences from their base"
    if spec.update.codec not in ("auto", *STATELESS):
        return f"updates in {spec.update.codec} depend on earlier ones"
    if spec.tuning.momentum:
        return "the momentum of optimizers is tuned"
    if spec.workers.gpus not in (None, 1):
        return "a worker with several processes adds numbers in another order"
    return None


def update_difference(sent: Tensor, right: Tensor, base: Tensor, parameters: int) -> float:
    """Return the relative difference of an update from the right one, float32 [floats] each.

    Both have differences from ``base`` of the first ``parameters`` elements, and values of the
    statistics after them. The difference is relative to the length of the right change, for
    parameters and for statistics; the larger of both counts.
    """
    difference, change = sent - right, right.clone()
    change[parameters:] -= base[parameters:]
    parts = (
        (slice(None, parameters), MIN_PARAMETERS),
        (slice(parameters, None), MIN_STATISTICS),
    )
    return max(
        float(difference[part].norm())
        / max(float(change[part].norm()), rounding * float(base[part].norm()), 1e-30)
        for part, rounding in parts
    )


class RepetitionOutcome(StrEnum):
    """Outcome of a repetition for an owner: its update was right, or wrong or impossible to check
    through its worker's fault, or its worker left before it answered."""

    RIGHT = "right"
    WRONG = "wrong"
    LEFT = "left"


class RepetitionJudge:
    """Judge of a job's owners by the repetitions of their updates."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[RepetitionOutcome]] = {}

    def count(self, owner: str, outcome: RepetitionOutcome) -> None:
        self._counts.setdefault(owner, Counter())[outcome] += 1

    @property
    def is_unclear(self) -> bool:
        """True if an owner would be accused, but no update of any owner was right.

        Then the task may depend on its machine, so that no other machine can repeat it.
        """
        wrong = [counts[RepetitionOutcome.WRONG] for counts in self._counts.values()]
        return max(wrong, default=0) >= MAX_WRONG and not self._any_right

    def accusation(self, owner: str) -> str | None:
        """Return why an owner's work is wrong; None if it isn't, or if that is unclear."""
        counts = self._counts.get(owner, Counter())
        right, wrong, left = (counts[each] for each in RepetitionOutcome)
        if wrong >= MAX_WRONG and self._any_right:
            return f"{wrong} of its {wrong + right} updates that were repeated are wrong"
        if left >= MAX_LEFT and left > right:
            return f"its machines left {left} times when they were asked for their states"
        return None

    @property
    def _any_right(self) -> bool:
        return any(counts[RepetitionOutcome.RIGHT] for counts in self._counts.values())
