"""A learner with several processes, its ranks: one leads (:class:`LeadingLearner`), and the others
do the same at the same time with other samples (:class:`FollowingLearner`)."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.learning.batch_source import SampleRange
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.training import Interval
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.task.task import Task
from vcasgd.worker.learner import Learner
from vcasgd.worker.ranks import RankInterval, RankPart, Ranks

#: Intervals whose batches the loader processes of further ranks load ahead.
AHEAD = 4


class LeadingLearner(Learner):
    """The first rank's learner. An error stops the others, and the next interval starts them."""

    def __init__(self, spec: JobSpec, task: Task, device: torch.device | str, ranks: Ranks) -> None:
        super().__init__(spec, task, device)
        self._ranks = ranks
        self._facts: ModelFacts | None = None
        #: The optimizer whose state all ranks have.
        self._shared: Optimizer | None = None

    def check_against(self, facts: ModelFacts) -> None:
        """See :meth:`Learner.check_against`; the other ranks start with these facts."""
        super().check_against(facts)
        self._facts = facts

    def shift(self, shifts: Iterable[tuple[ShardRange, Tensor]]) -> None:
        """See :meth:`Learner.shift`."""
        shifts = list(shifts)
        if self._ranks.running:
            self._ranks.shift([(part.start, floats) for part, floats in shifts])
        super().shift(shifts)

    def close(self) -> None:
        """See :meth:`Learner.close`."""
        self._ranks.stop()
        super().close()

    def _train_interval(
        self,
        interval: SampleRange,
        loaded: tuple[Tensor, Tensor] | None,
        asynchrony: float,
        should_stop: Callable[[], bool],
        on_step: Callable[[], None],
    ) -> Interval:
        def stops() -> bool:
            stop = should_stop()
            self._ranks.step(stop=stop)
            return stop

        try:
            if not self._ranks.running:
                self._start_ranks()
                loaded = self._model.read()
            if loaded is not None:
                self._ranks.load(*loaded)
            order = self._order(interval, asynchrony)
            self._ranks.begin(order)
            self._shared = self.optimizer
            trained = self._steps(interval, iter(order.following), stops, on_step)
            whole = self._ranks.end(_part(self, trained))
        except BaseException:
            self._ranks.stop()
            raise
        if math.isnan(whole.checksum):
            # Without the same state, gradients of one would be steps of another.
            self._ranks.stop()
        return Interval(whole.samples, trained.steps, whole.loss_sum)

    def _start_ranks(self) -> None:
        assert self._facts is not None
        self._ranks.start(self._facts, self.layout.floats, str(self.device))
        assert self._ranks.group is not None
        self.join(self._ranks.group)
        self._shared = None

    def _order(self, interval: SampleRange, asynchrony: float) -> RankInterval:
        new = self.optimizer is not self._shared
        return RankInterval(
            interval,
            tuple(islice(self._following(interval.subtask, interval.stop), AHEAD)),
            self.member.batch if self.member else None,
            asynchrony,
            self._divergences,
            self._optimizer_state() if new else None,
        )

    def _optimizer_state(self) -> bytes:
        """Return the state of the optimizer and its corrections for the other ranks."""
        assert self.optimizer is not None
        out = io.BytesIO()
        moments = self.member.moments if self.member else None
        noise = moments.state() if moments else {}
        torch.save({"optimizer": self.optimizer.state_dict(), "noise": noise}, out)
        return out.getvalue()


class FollowingLearner(Learner):
    """A further rank's learner."""

    def load(self, floats: Tensor, integers: Tensor) -> None:
        """LoadModel a model, float32 [floats] and int64 [k]."""
        self._model.load(floats, integers)

    def shift_part(self, start: int, floats: Tensor) -> None:
        """Add float32 [n] to the model from an element on."""
        self._model.shift_part(floats, start)

    def follow(self, order: RankInterval, *, should_stop: Callable[[], bool]) -> RankPart:
        """Train this rank's part of an interval."""
        if order.optimizer is not None:
            self._divergences = order.divergences
            self.optimizer = None
            self.start_subtask()
            self._load_optimizer(order.optimizer)
        if self.member is not None and order.batch is not None:
            self.member.assign(order.batch)
        if self._momenta is not None:
            self._momenta.follow(order.asynchrony)
        steps = self._steps(order.samples, iter(order.following), should_stop, lambda: None)
        return _part(self, steps)

    def _load_optimizer(self, data: bytes) -> None:
        assert self.optimizer is not None
        # It comes from the same user's code.
        state = torch.load(io.BytesIO(data), map_location=self.device, weights_only=False)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.member is not None and self.member.moments is not None:
            self.member.moments.load_state(state["noise"])


def _part(learner: Learner, trained: Interval) -> RankPart:
    return RankPart(trained.samples, trained.loss_sum, learner.checksum())
