"""The volunteer's side: commits to the state around each interval, and uploads it when asked."""

from __future__ import annotations

import logging
from collections import deque

from torch.optim import Optimizer

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.verification.exchange import WRONG_STATE, Claims, RepetitionExchange
from vcasgd.verification.state import LearnerState, NotRepeatable
from vcasgd.verification.verifier import format_of, renew_optimizer, state_of
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner
from vcasgd.worker.update_queue import MAX_UNAPPLIED
from vcasgd.worker.verification import WorkerVerification

log = logging.getLogger(__name__)


class StateRecorder(WorkerVerification):
    """Keeps the states of the intervals that the parameter server may still ask for.

    It asks at the latest when it has applied the update, and this worker looks before each
    interval. So the last :data:`~vcasgd.worker.update_queue.MAX_UNAPPLIED` are enough.
    """

    #: A repetition starts from a version and from a state that another machine knows.
    overlaps = adopts = False

    def __init__(self, tensors: RedisClient, job: str, worker: str) -> None:
        self._exchange = RepetitionExchange(tensors, TensorKeys(job))
        self._worker = worker
        #: Names of updates, with the states before and after their intervals.
        self._kept: deque[tuple[str, LearnerState, LearnerState]] = deque(maxlen=MAX_UNAPPLIED)
        #: States before the interval in progress, and after the last one.
        self._before: LearnerState | None = None
        self._after: LearnerState | None = None
        #: The optimizer of the last interval, and True until that interval has ended.
        self._optimizer: Optimizer | None = None
        self._training = False
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
        for update, before, after in self._kept:
            if update == request.update:
                log.info("uploading the states of update %s, to have it repeated", update)
                self._exchange.upload(request, before.to_bytes(), after.to_bytes())
                break
        else:
            log.warning("the states of update %s are no longer kept", request.update)
        self._answered = request.id
        return True

    def begin(self, learner: Learner, base: Base) -> None:
        """Note the state before an interval: that after the last one, or a new optimizer's."""
        failed, self._training, self._before = self._training, True, None
        try:
            state_format = format_of(learner)
        except NotRepeatable as error:
            log.debug("no state is recorded: %s", error)
            return
        if failed:
            # What an interval without an end left is in no update.
            renew_optimizer(learner)
        goes_back = base.rollbacks != learner.rollbacks
        continues = learner.optimizer is self._optimizer and not goes_back
        self._before = self._after if continues else LearnerState(state_format, {})

    def end(self, learner: Learner, update: str, planned: int) -> str:
        """Copy the state after the interval; return the digests of both."""
        self._training, self._optimizer, self._after = False, learner.optimizer, None
        if self._before is None:
            return ""
        try:
            self._after = state_of(learner)
        except NotRepeatable as error:
            log.debug("no state is recorded: %s", error)
            return ""
        self._kept.append((update, self._before, self._after))
        claims = Claims(planned=planned, before=self._before.digest, after=self._after.digest)
        return claims.model_dump_json()

    def rejected(self, reason: str) -> None:
        """Start with a new optimizer if the parameter server doesn't know the present state.

        It has not applied an update before, for example because the lease was lost. The new one has
        no state at all, because only that is known without an update.
        """
        if reason == WRONG_STATE:
            self._renews = True
