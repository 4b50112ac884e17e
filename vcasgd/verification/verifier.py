"""The side of a machine of the cluster: repeats volunteers' intervals between its own ones."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.optim import Optimizer

from vcasgd.errors import InvalidUpdate, NonFiniteLoss, UserCodeError
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.untrusted import Invalid
from vcasgd.store.tensors.snapshot import encode_integers
from vcasgd.verification.exchange import (
    MAX_DIFFERENCE,
    Claims,
    RepetitionExchange,
    RepetitionResult,
    RepetitionTask,
    StateName,
)
from vcasgd.verification.judge import update_difference
from vcasgd.verification.repeater import (
    IntervalFacts,
    RepeatingLearner,
    WrongInterval,
    format_of,
    state_of,
)
from vcasgd.verification.state import LearnerState, MalformedState, NotRepeatable, StateFormat
from vcasgd.worker.learner import Learner
from vcasgd.worker.verification import WorkerVerification

log = logging.getLogger(__name__)

#: Seconds between two looks for a task.
LOOK_SECONDS = 1.0


class Verifier(WorkerVerification):
    """Repeats intervals and reports the differences; this worker's training stays the same.

    ``should_stop`` is True once the worker has to leave, and ``on_step`` is called after each
    repeated step.
    """

    def __init__(
        self,
        tensors: RedisClient,
        job: str,
        worker: str,
        should_stop: Callable[[], bool],
        on_step: Callable[[], None],
    ) -> None:
        self._exchange = RepetitionExchange(tensors, TensorKeys(job))
        self._worker = worker
        self._should_stop, self._on_step = should_stop, on_step
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
        trained = repeating.repeat(
            facts, base, before, should_stop=self._should_stop, on_step=self._on_step
        )
        if self._should_stop():
            return RepetitionResult(outcome="unable", why="the worker had to leave")
        unchanged = torch.equal(base[1], trained.integers)
        if header.integers != ("" if unchanged else encode_integers(trained.integers)):
            raise MalformedState("the counters of the update are not those of its interval")
        difference = update_difference(sent, trained.update, base[0], repeating.layout.parameters)
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
