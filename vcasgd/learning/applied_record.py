"""The record of the samples in a snapshot; it makes every sample count exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from vcasgd.errors import CheckpointDamaged, InvalidUpdate
from vcasgd.learning.subtask_set import SubtaskSet
from vcasgd.learning.subtasks import EpochPlan


class AppliedRecord:
    """The applied samples of a job, as one position per subtask.

    The samples of a subtask are applied in order, so a position is enough. When all subtasks of an
    epoch are done and all earlier epochs are finished, they are folded into ``finished_epochs``,
    so the record covers only the current epochs. Of these, it has one bit for a subtask that is
    done, and a position for one that is partly applied. No method's cost grows with the number of
    subtasks, except for the creation and the end of an epoch.

    ``positions`` may contain done subtasks, as in records of version 0.1.0, and those of finished
    epochs, which don't count. Raises :class:`CheckpointDamaged` if this is not a record of the
    plan.
    """

    def __init__(
        self,
        plan: EpochPlan,
        finished_epochs: int = 0,
        positions: Mapping[int, int] | None = None,
        done: Mapping[int, bytes] | None = None,
    ) -> None:
        self.plan = plan
        if not 0 <= finished_epochs <= plan.epochs:
            raise _damaged(f"{finished_epochs} finished epochs of {plan.epochs}")
        #: Epochs ``[0, finished_epochs)`` are completely applied.
        self.finished_epochs = finished_epochs
        #: Partly applied subtask of an unfinished epoch → number of its applied samples.
        self.positions: dict[int, int] = {}
        #: Completely applied subtasks of unfinished epochs.
        self.done = _bitmap(done)
        self.done.remove_below(self.first_open)
        self._take(positions or {})
        numbers = self.done.numbers()
        if len(numbers) and numbers[-1] >= plan.total_subtasks:
            raise _damaged(f"there is no subtask {numbers[-1]}")
        finished = min(finished_epochs * plan.samples, plan.total_samples)
        partly = sum(self.positions.values())
        #: Number of applied samples over all epochs.
        self.samples_applied = finished + partly + int(plan.sizes(numbers).sum())
        epochs, counts = np.unique(numbers // plan.subtasks_per_epoch, return_counts=True)
        self._done_in = Counter(dict(zip(epochs.tolist(), counts.tolist(), strict=True)))
        self._fold()

    def _take(self, positions: Mapping[int, int]) -> None:
        for subtask, stop in positions.items():
            if not (
                0 <= subtask < self.plan.total_subtasks and 0 <= stop <= self.plan.size(subtask)
            ):
                raise _damaged(f"subtask {subtask} has no position {stop}")
            if subtask < self.first_open or not stop or subtask in self.done:
                continue
            if stop == self.plan.size(subtask):
                self.done.add(subtask)
            else:
                self.positions[subtask] = stop

    @property
    def first_open(self) -> int:
        """The first subtask of the first unfinished epoch."""
        return self.finished_epochs * self.plan.subtasks_per_epoch

    @property
    def complete(self) -> bool:
        """True if every sample of the job is applied."""
        return self.finished_epochs == self.plan.epochs

    def position(self, subtask: int) -> int:
        """Return the applied samples of a subtask. Raises as :meth:`EpochPlan.bounds`."""
        size = self.plan.size(subtask)
        done = subtask < self.first_open or subtask in self.done
        return size if done else self.positions.get(subtask, 0)

    def is_done(self, subtask: int) -> bool:
        """Return True if a subtask is completely applied. Raises as :meth:`EpochPlan.bounds`."""
        return self.position(subtask) == self.plan.size(subtask)

    def check(self, subtask: int, start: int, stop: int) -> None:
        """Check that the samples ``[start, stop)`` of a subtask are the next ones to apply.

        Raises :class:`InvalidUpdate` with the reason ``range`` (no such samples), ``duplicate``
        (already applied), or ``out-of-place`` (earlier samples are missing).
        """
        position, size = self.position(subtask), self.plan.size(subtask)
        samples = f"samples [{start}, {stop}) of subtask {subtask}"
        if not 0 <= start < stop <= size:
            raise InvalidUpdate(f"{samples} do not exist: it has {size}", reason="range")
        if start < position:
            raise InvalidUpdate(f"{samples} are applied up to {position}", reason="duplicate")
        if start > position:
            raise InvalidUpdate(f"{samples} do not start at {position}", reason="out-of-place")

    def advance(self, subtask: int, start: int, stop: int) -> bool:
        """Record the samples ``[start, stop)`` of a subtask as applied.

        Returns True if this finishes an epoch, or several. Raises as :meth:`check`; the record is
        then unchanged.
        """
        self.check(subtask, start, stop)
        self.samples_applied += stop - start
        if stop < self.plan.size(subtask):
            self.positions[subtask] = stop
            return False
        self.positions.pop(subtask, None)
        self.done.add(subtask)
        self._done_in[self.plan.epoch_of(subtask)] += 1
        return self._fold()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AppliedRecord):
            return NotImplemented
        return (self.plan, self._content()) == (other.plan, other._content())

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"AppliedRecord({self.plan}, *{self._content()})"

    def _content(self) -> tuple[int, dict[int, int], dict[int, bytes]]:
        return self.finished_epochs, self.positions, self.done.blocks

    def _fold(self) -> bool:
        before = self.finished_epochs
        while not self.complete:
            if self._done_in[self.finished_epochs] < self.plan.subtasks_in(self.finished_epochs):
                break
            del self._done_in[self.finished_epochs]
            self.finished_epochs += 1
        if self.finished_epochs == before:
            return False
        self.done.remove_below(self.first_open)
        return True


def _bitmap(blocks: Mapping[int, bytes] | None) -> SubtaskSet:
    try:
        return SubtaskSet(blocks)
    except ValueError as error:
        raise _damaged(str(error)) from error


def _damaged(why: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"not an applied record: {why}")
