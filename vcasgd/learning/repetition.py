"""Repetition of push intervals: how far an update is from the right one, and what follows for its
owner.

An interval is a function of its base, its samples, and the learner's state before it. Another
machine that repeats it gets the same update, but for the rounding of its hardware. So a single
repetition shows what screening can't (:mod:`vcasgd.learning.screening`): a slight push in one
direction, or a flipped update that is no longer than others. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

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
    if spec.update.codec not in STATELESS:
        return f"updates in {spec.update.codec} depend on earlier ones"
    if spec.tuning.momentum:
        return "the momentum of optimizers is tuned"
    return None


def update_difference(sent: Tensor, right: Tensor, base: Tensor, parameters: int) -> float:
    """Return the relative difference of an update from the right one, float32 [floats] each.

    Both have differences from ``base`` of the first ``parameters`` elements, and values of the
    statistics after them. The difference is relative to the length of the right change, for
    parameters and for statistics; the larger of both counts.
    """
    change = right[parameters:] - base[parameters:]
    least = MIN_PARAMETERS * float(base[:parameters].norm())
    min_statistics = MIN_STATISTICS * float(base[parameters:].norm())
    return max(
        _relative(sent[:parameters], right[:parameters], right[:parameters], least),
        _relative(sent[parameters:], right[parameters:], change, min_statistics),
    )


def _relative(sent: Tensor, right: Tensor, change: Tensor, least: float) -> float:
    return float((sent - right).norm()) / max(float(change.norm()), least, 1e-30)


@dataclass
class RepetitionCounts:
    """Results of the repetitions of one owner's updates."""

    right: int = 0
    wrong: int = 0
    left: int = 0


class RepetitionJudge:
    """Judge of a job's owners by the repetitions of their updates."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, RepetitionCounts] = defaultdict(RepetitionCounts)

    def right(self, owner: str) -> None:
        """Count an update that was what its interval gives."""
        self._counts[owner].right += 1

    def wrong(self, owner: str) -> None:
        """Count one that wasn't, or that couldn't be checked through its worker's fault."""
        self._counts[owner].wrong += 1

    def left(self, owner: str) -> None:
        """Count one whose worker left before it answered."""
        self._counts[owner].left += 1

    @property
    def is_unclear(self) -> bool:
        """True if an owner would be accused, but no update of any owner was right.

        Then the task may depend on its machine, so that no other machine can repeat it.
        """
        return not self._any_right and any(
            each.wrong >= MAX_WRONG for each in self._counts.values()
        )

    def accusation(self, owner: str) -> str | None:
        """Return why an owner's work is wrong; None if it isn't, or if that is unclear."""
        counts = self._counts[owner]
        if counts.wrong >= MAX_WRONG and self._any_right:
            number = counts.wrong + counts.right
            return f"{counts.wrong} of its {number} updates that were repeated are wrong"
        if counts.left >= MAX_LEFT and counts.left > counts.right:
            return f"its machines left {counts.left} times when they were asked for their states"
        return None

    @property
    def _any_right(self) -> bool:
        return any(each.right for each in self._counts.values())
