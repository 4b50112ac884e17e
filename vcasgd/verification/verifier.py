"""The side of a machine of the cluster: repeats volunteers' intervals beside its own training."""

from __future__ import annotations

import base64
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.errors import InvalidUpdate, NonFiniteLoss, UserCodeError
from vcasgd.learning.batch_source import SampleRange
from vcasgd.learning.optimizers import OptimizerList
from vcasgd.learning.vector import counted
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.untrusted import Invalid
from vcasgd.verification.exchange import (
    MAX_DIFFERENCE,
    RESULT_SECONDS,
    Claims,
    RepetitionExchange,
    RepetitionResult,
    RepetitionTask,
    StateName,
)
from vcasgd.verification.judge import update_difference, why_not_repeatable
from vcasgd.verification.state import LearnerState, MalformedState, NotRepeatable, StateFormat
from vcasgd.worker.interval import Base, Trained, encoded_counters
from vcasgd.worker.learner import Learner
from vcasgd.worker.member import Member
from vcasgd.worker.verification import WorkerVerification

log = logging.getLogger(__name__)

#: Seconds between two looks for a task.
LOOK_SECONDS = 1.0


class Verifier(WorkerVerification):
    """Repeats intervals and reports the differences; this worker's training stays the same.

    ``after_step`` is called after each repeated step, and is True once the worker has to leave.
    A repetition ends after so many ``seconds``.
    """

    def __init__(
        self,
        tensors: RedisClient,
        job: str,
        worker: str,
        after_step: Callable[[], bool],
        seconds: float = RESULT_SECONDS,
    ) -> None:
        self._exchange = RepetitionExchange(tensors, TensorKeys(job))
        self._worker = worker
        self._after_step = after_step
        self._seconds = seconds
        #: The last optimizer that was looked at, and whether its intervals can be repeated.
        self._able: tuple[Optimizer | None, bool] = (None, False)
        self._look_at = 0.0
        self._done = ""

    def end(self, learner: Learner, update: str, planned: int) -> str:  # noqa: ARG002
        """Tell the parameter server that this worker can repeat intervals, if it can."""
        if self._able[0] is not learner.optimizer:
            self._able = learner.optimizer, _is_repeatable(learner)
        return Claims(repeats=True).model_dump_json() if self._able[1] else ""

    def serve(self, learner: Learner) -> bool:
        """Repeat an interval if the parameter server asks this worker to."""
        if not self._able[1] or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            task = self._exchange.task()
        except Invalid as error:
            log.warning("the task of a repetition can't be read: %s", error)
            return False
        if task is None or task.by != self._worker or task.id == self._done:
            return False
        result = self._result(learner, task)
        log.info("repeated update %s: %s", task.update.update, result)
        self._exchange.report(task, result)
        self._done = task.id
        return True

    def _result(self, learner: Learner, task: RepetitionTask) -> RepetitionResult:
        repeating = RepeatingLearner(learner)
        try:
            return self._repeat(repeating, task)
        except (MalformedState, WrongInterval, NonFiniteLoss) as error:
            return RepetitionResult(outcome="malformed", why=str(error))
        except (Invalid, InvalidUpdate, NotRepeatable, UserCodeError) as error:
            if isinstance(error, NotRepeatable):
                self._able = learner.optimizer, False
            log.warning("update %s can't be repeated: %s", task.update.update, error)
            return RepetitionResult(outcome="unable", why=str(error))
        finally:
            repeating.close()

    def _repeat(self, repeating: RepeatingLearner, task: RepetitionTask) -> RepetitionResult:
        header, floats = task.update, repeating.layout.floats
        claims = Claims.of(header)
        counters = np.frombuffer(base64.b64decode(task.integers), dtype="<i8").astype(np.int64)
        base = self._exchange.vector(task, "base", floats), torch.from_numpy(counters)
        sent = self._exchange.vector(task, "sent", floats)
        before = self._state(task, "before", claims.before, repeating.format)
        after = self._state(task, "after", claims.after, repeating.format)
        facts = IntervalFacts(
            *(header.subtask, header.start, header.stop, claims.planned, header.batch),
            *(header.rollbacks, task.restorations),
        )
        deadline = time.monotonic() + self._seconds

        def ends() -> bool:
            return self._after_step() or time.monotonic() > deadline

        trained = repeating.repeat(facts, base, before, ends)
        if ends():
            return RepetitionResult(outcome="unable", why="it took too long, or had to leave")
        if header.skipped != trained.skipped:
            raise MalformedState(
                f"{header.skipped} samples of the interval are skipped, and {trained.skipped} of "
                "its repetition"
            )
        changed = counted(repeating.layout, base[1], trained.integers)
        if header.integers != encoded_counters(changed):
            raise MalformedState("the counters of the update are not those of its interval")
        parameters, update = repeating.layout.parameters, trained.update[:]
        difference = update_difference(sent, update, base[0], parameters)
        state_difference = after.difference(state_of(repeating))
        # In this order, because NaN is not less than anything.
        return RepetitionResult(
            outcome="repeated",
            update=min(MAX_DIFFERENCE, difference),
            state=min(MAX_DIFFERENCE, state_difference),
        )

    def _state(
        self, task: RepetitionTask, name: StateName, digest: str, state_format: StateFormat
    ) -> LearnerState:
        """Return an uploaded state. Raises :class:`MalformedState`."""
        try:
            state = state_format.parse(self._exchange.state(task, name, state_format.max_bytes))
        except (Invalid, MalformedState) as error:
            raise MalformedState(f"the state {name} the interval: {error}") from error
        if state.digest != digest:
            raise MalformedState(f"the state {name} the interval isn't the one in its update")
        return state


def _is_repeatable(learner: Learner) -> bool:
    try:
        format_of(learner)
    except NotRepeatable as error:
        log.info("intervals of this job can't be repeated: %s", error)
        return False
    return True


# --- the repetition -----------------------------------------------------------------------------


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
    if isinstance(learner.optimizer, OptimizerList):
        raise NotRepeatable("the task has several optimizers")
    if learner.layout.gradients:
        raise NotRepeatable("an interval also depends on gradients of the previous one")
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
        after_step: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """Repeat an interval from its base, float32 [floats] and int64 [k], and the state before.

        Raises :class:`WrongInterval`, :class:`NotRepeatable` if the task has no other optimizer,
        and what :meth:`train` does.
        """
        self._check(facts)
        self.rollbacks = facts.rollbacks
        self._divergences = facts.rollbacks - facts.restorations
        self._member = (
            _RepeatedMember(self.findings.batch_size, facts.batch) if self._rule.rounds else None
        )
        renew_optimizer(self)
        assert self.optimizer is not None
        before.load(self.optimizer, self._member.moments if self._member else None)
        # An interval that was cut short ended after a whole local step.
        limit = -(-(facts.stop - facts.start) // self._step_size(facts.planned - facts.start))
        steps, leaves = 0, False

        def count() -> bool:
            nonlocal steps, leaves
            steps, leaves = steps + 1, after_step()
            return leaves or steps >= limit

        with torch.random.fork_rng(devices=[]):
            trained = self.train(
                Base(*base, facts.rollbacks, facts.restorations),
                facts.subtask,
                facts.start,
                facts.planned,
                after_step=count,
            )
        if trained.stop != facts.stop and not leaves:
            raise WrongInterval(f"an interval that ends at sample {facts.stop}")
        return trained

    def _check(self, facts: IntervalFacts) -> None:
        if not 0 <= facts.subtask < self.plan.total_subtasks:
            raise WrongInterval(f"subtask {facts.subtask}")
        if not 0 <= facts.start < facts.stop <= facts.planned <= self.plan.size(facts.subtask):
            raise WrongInterval(f"samples {facts.start} to {facts.stop} of {facts.planned}")
        if self._rule.rounds and not 1 <= facts.batch <= self.findings.batch_size:
            raise WrongInterval(f"a local batch of {facts.batch:g} samples")

    def _following(self, subtask: int, start: int) -> Iterator[SampleRange]:  # noqa: ARG002
        # Nothing follows a repetition.
        return iter(())


class _RepeatedMember(Member):
    """Part of a worker with a given local batch in the rounds of a job."""

    def __init__(self, job_batch: int, batch: float) -> None:
        super().__init__(job_batch, 1, 1)
        self._batch.size = batch
