"""The volunteer's side: commits to the state around each interval, and uploads it when asked."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.repetitions import WRONG_STATE, RepetitionExchange
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner
from vcasgd.worker.repetition.duty import RepetitionDuty
from vcasgd.worker.repetition.repeater import (
    check_repeatable,
    new_state,
    renew_optimizer,
    state_of,
)
from vcasgd.worker.repetition.state import LearnerState, NotRepeatable
from vcasgd.worker.update_queue import MAX_UNAPPLIED

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commitment:
    """A state, and the digest that an update names."""

    state: LearnerState
    digest: str

    @classmethod
    def to(cls, state: LearnerState) -> Commitment:
        """Return the commitment to a state."""
        return cls(state, state.digest)


class StateRecorder(RepetitionDuty):
    """Keeps the states of the intervals that the parameter server may still ask for.

    It asks at the latest when it has applied the update, and this worker looks before each
    interval. So the last :data:`~vcasgd.worker.update_queue.MAX_UNAPPLIED` are enough.
    """

    #: A repetition starts from a version, and from nothing else.
    overlaps = False

    def __init__(self, tensors: RedisClient, job: str, worker: str) -> None:
        self._exchange = RepetitionExchange(tensors, TensorKeys(job))
        self._worker = worker
        self._kept: deque[tuple[str, Commitment, Commitment]] = deque(maxlen=MAX_UNAPPLIED)
        self._before: Commitment | None = None
        #: State after the last interval, and the optimizer that it is of.
        self._after: tuple[Commitment, Optimizer | None] | None = None
        self._answered = ""
        self._renews = False

    def serve(self, learner: Learner) -> bool:
        """Upload states if the parameter server asks this worker for some that it still has."""
        if self._renews:
            self._renews = False
            renew_optimizer(learner)
        request = self._exchange.requested() if self._kept else None
        if request is None or request.worker != self._worker or request.id == self._answered:
            return False
        kept = {update: states for update, *states in self._kept}
        if request.update in kept:
            log.info("uploading the states of update %s, to have it repeated", request.update)
            self._exchange.upload(request, *(each.state.data for each in kept[request.update]))
        else:
            log.warning("the states of update %s are no longer kept", request.update)
        self._answered = request.id
        return True

    def begin(self, learner: Learner, base: Base) -> None:
        """Copy the state before an interval, unless it is that after the last one."""
        after, self._after, self._before = self._after, None, None
        try:
            check_repeatable(learner)
            if base.rollbacks != learner.rollbacks:
                # The interval starts with a new optimizer.
                self._before = Commitment.to(new_state(learner))
            elif after is not None and after[1] is learner.optimizer:
                self._before = after[0]
            else:
                self._before = Commitment.to(state_of(learner))
        except NotRepeatable as error:
            log.debug("no state is recorded: %s", error)

    def end(self, learner: Learner, planned: int) -> dict[str, Any]:
        """Copy the state after the interval; return the digests of both."""
        if self._before is None:
            return {}
        try:
            self._after = Commitment.to(state_of(learner)), learner.optimizer
        except NotRepeatable as error:
            log.debug("no state is recorded: %s", error)
            return {}
        return {
            "planned": planned,
            "state_before": self._before.digest,
            "state_after": self._after[0].digest,
        }

    def submitted(self, update: str) -> None:
        """Keep both states, in place of the oldest ones."""
        if self._before is not None and self._after is not None:
            self._kept.append((update, self._before, self._after[0]))

    def rejected(self, reason: str) -> None:
        """Start with a new optimizer if the parameter server doesn't know the present state.

        It has not applied an update before, for example because the lease was lost. The new one has
        no state at all, because only that is known without an update.
        """
        if reason == WRONG_STATE:
            self._renews, self.adopts = True, False
