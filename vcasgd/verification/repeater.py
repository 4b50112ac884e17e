"""Repeats a push interval of another worker beside a learner's own training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.learning.batch_source import SampleRange
from vcasgd.verification.judge import why_not_repeatable
from vcasgd.verification.state import LearnerState, NotRepeatable, StateFormat
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.member import Member


class WrongInterval(Exception):
    """Facts of an interval that no worker of this job trains. The message is the reason."""


@dataclass(frozen=True)
class IntervalFacts:
    """Facts of an interval that its update names.

    Samples ``[start, stop)`` of a subtask, of which more were ``planned``; the local ``batch`` is a
    mean, 0 without rounds; ``rollbacks`` and ``restorations`` are those before its base.
    """

    subtask: int
    start: int
    stop: int
    planned: int
    batch: float
    rollbacks: int = 0
    restorations: int = 0


def format_of(learner: Learner) -> StateFormat:
    """Return the format of a learner's states.

    Raises :class:`NotRepeatable` if its intervals depend on more than their base, their samples,
    and the state of an optimizer.
    """
    task = learner.task
    if why := why_not_repeatable(learner.spec):
        raise NotRepeatable(why)
    if task.makes_steps or not task.repeatable:
        raise NotRepeatable("the task is a script, or a trainer of another library")
    if task.mixed_precision is not None:
        raise NotRepeatable(f"{task.mixed_precision} rounds too much")
    if learner.optimizer is None:
        raise NotRepeatable("there is no optimizer yet")
    return StateFormat(learner.optimizer)


def state_of(learner: Learner) -> LearnerState:
    """Return a copy of a learner's present state. Raises :class:`NotRepeatable`."""
    if learner.optimizer is None:
        raise NotRepeatable("there is no optimizer yet")
    member = learner.member
    return LearnerState.of(learner.optimizer, member.moments if member else None)


def renew_optimizer(learner: Learner) -> None:
    """Give a learner a new optimizer, in the middle of a subtask, too."""
    learner.optimizer = None
    learner.start_subtask()


class RepeatingLearner(Learner):
    """A learner with the model and the data of another one, and with an optimizer of its own.

    Only one of both may train at a time: the other one loads its next base anyway.
    """

    def __init__(self, learner: Learner) -> None:
        """Raise as :func:`format_of` does; ``learner`` should have trained."""
        self.format = format_of(learner)
        vars(self).update(vars(learner))
        # The learner's own loader processes are ahead of it.
        vars(self).pop("_source", None)
        assert learner.optimizer is not None
        #: The optimizer that the other learner trains with.
        self._live = learner.optimizer

    def _new_optimizer(self) -> Optimizer:
        live = self._live
        kept = live.state, live.param_groups
        # The task may return the same optimizer again, and reset it.
        live.state, live.param_groups = defaultdict(dict), [{**group} for group in kept[1]]
        try:
            made = super()._new_optimizer()
        finally:
            live.state, live.param_groups = kept
        if made is live:
            raise NotRepeatable("the task returns the same optimizer each time")
        return made

    def repeat(
        self,
        facts: IntervalFacts,
        base: tuple[Tensor, Tensor],
        before: LearnerState,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[], None] = lambda: None,
    ) -> Trained:
        """Repeat an interval from its base, float32 [floats] and int64 [k], and the state before.

        Raises :class:`WrongInterval`, :class:`NotRepeatable` if the task has no other optimizer,
        and what :meth:`train` does.
        """
        self._check(facts)
        self.rollbacks = facts.rollbacks
        self._divergences = facts.rollbacks - facts.restorations
        self._member = _RepeatedMember(self._batch_size, facts.batch) if self._rule.rounds else None
        renew_optimizer(self)
        assert self.optimizer is not None
        before.load(self.optimizer, self._member.moments if self._member else None)
        # An interval that was cut short ended after a whole local step.
        limit = -(-(facts.stop - facts.start) // self._step_size(facts.planned - facts.start))
        steps = 0

        def count() -> None:
            nonlocal steps
            steps += 1
            on_step()

        with torch.random.fork_rng(devices=[]):
            trained = self.train(
                Base(*base, facts.rollbacks, facts.restorations),
                facts.subtask,
                facts.start,
                facts.planned,
                should_stop=lambda: should_stop() or steps >= limit,
                on_step=count,
            )
        if trained.stop != facts.stop and not should_stop():
            raise WrongInterval(f"an interval that ends at sample {facts.stop}")
        return trained

    def _check(self, facts: IntervalFacts) -> None:
        if not 0 <= facts.subtask < self.plan.total_subtasks:
            raise WrongInterval(f"subtask {facts.subtask}")
        if not 0 <= facts.start < facts.stop <= facts.planned <= self.plan.size(facts.subtask):
            raise WrongInterval(f"samples {facts.start} to {facts.stop} of {facts.planned}")
        if self._rule.rounds and not 1 <= facts.batch <= self._batch_size:
            raise WrongInterval(f"a local batch of {facts.batch:g} samples")

    def _following(self, subtask: int, start: int) -> Iterator[SampleRange]:  # noqa: ARG002
        # Nothing follows a repetition.
        return iter(())


class _RepeatedMember(Member):
    """Part of a worker with a given local batch in the rounds of a job."""

    def __init__(self, job_batch: int, batch: float) -> None:
        super().__init__(job_batch, 1, 1)
        self._batch.size = batch
