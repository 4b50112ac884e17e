"""A learner with several processes, its ranks: one leads (:class:`LeadingLearner`), and the others
do the same at the same time with other samples (:class:`FollowingLearner`)."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.errors import SpecError
from vcasgd.learning.batch_source import SampleRange
from vcasgd.learning.local_model import LocalModel
from vcasgd.learning.model_evaluation import EvaluationPart, Metrics, evaluates_at_once
from vcasgd.learning.optimizers import load_state
from vcasgd.learning.rank_group import RankGroup, share_norms
from vcasgd.learning.sharded_model import ShardedModel, check_optimizer, check_task, is_sharded
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.training import Interval
from vcasgd.learning.vector import Floats
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.task.task import Task
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.ranks import RankEvaluation, RankInterval, RankPart, Ranks

#: Intervals whose batches the loader processes of further ranks load ahead.
AHEAD = 4


class _RankedLearner(Learner):
    """A learner of a model that all ranks have, or that each has a part of."""

    def _build_model(self) -> LocalModel:
        self.sharded = is_sharded(self.task)
        if not self.sharded:
            model = super()._build_model()
            share_norms(model.module, None)
            return model
        self._parts = ShardedModel(self.task, self.spec.seed, self.device)
        check_task(self.task)
        return self._parts

    def _new_optimizer(self) -> Optimizer:
        optimizer = super()._new_optimizer()
        if self.sharded:
            check_optimizer(optimizer)
        return optimizer

    @property
    def model(self) -> LocalModel:
        """The model, or this rank's part of it."""
        return self._model

    def join(self, group: RankGroup) -> None:
        """Train a part of each batch together with other processes from now on.

        A sharded model is a new one, without values.
        """
        self._group, self._source.part = group, group.part
        if self.sharded:
            self._parts.shard(group.mesh)
            self.optimizer = None
            self.start_subtask()
        share_norms(self._model.module, group)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Call the user's code, which computes with the other ranks."""
        assert self._group is not None
        with self._group.watched():
            yield
        if self.sharded:
            self._parts.reshard()

    def _steps(
        self,
        interval: SampleRange,
        following: Iterator[SampleRange],
        after_step: Callable[[], bool],
    ) -> Interval:
        with self._computing():
            return super()._steps(interval, following, after_step)

    def _rehearse_own(self) -> list[str]:
        assert self._group is not None
        with self._computing():
            # An evaluation alone needs no other rank.
            self._group.average([torch.ones(1, device=self.device)])
            return super()._rehearse()

    def _evaluate_own(self, after_step: Callable[[], bool]) -> Metrics:
        """Evaluate this rank's part of the validation set with the model as it is."""
        assert self._group is not None
        part = EvaluationPart(self._group.rank, self._group.size)
        with self._computing():
            return self._evaluate_part(part, after_step)


class LeadingLearner(_RankedLearner):
    """The first rank's learner. An error stops the others, and the next interval starts them."""

    def __init__(self, spec: JobSpec, task: Task, device: torch.device | str, ranks: Ranks) -> None:
        super().__init__(spec, task, device)
        self._ranks = ranks
        if self.sharded:
            self._parts.read_others = ranks.read
        self._facts: ModelFacts | None = None
        #: The optimizer whose state all ranks have.
        self._shared: Optimizer | None = None

    @property
    def maps_vectors(self) -> bool:
        return self.sharded

    @property
    def is_loaded(self) -> bool:
        """See :meth:`Learner.is_loaded`. New ranks have nothing of a sharded model."""
        return super().is_loaded and (self._ranks.running or not self.sharded)

    def check_against(self, facts: ModelFacts) -> None:
        """See :meth:`Learner.check_against`; the other ranks start with these facts."""
        super().check_against(facts)
        self._check_division()
        if facts != self._facts:
            self._ranks.stop()
        self._facts = facts

    def facts(self, nodes: int, *, verified: bool = False) -> ModelFacts:
        """See :meth:`Learner.facts`. Raises :class:`SpecError` for a loss of whole batches."""
        self._check_division()
        self._facts = super().facts(nodes, verified=verified)
        return self._facts

    def _check_division(self) -> None:
        division = self.findings.division
        if division.of_whole_loss:
            raise SpecError(
                f"task: the processes of a worker can't share a batch: {division.why}",
                remedy="set workers.gpus: 1, or min_local_batch if a part of a batch is enough",
                field="workers.gpus",
            )

    def _rehearse(self) -> list[str]:
        if not self.sharded:
            return super()._rehearse()
        return self._rehearse_together()

    def try_ranks(self, facts: ModelFacts) -> None:
        """Let all ranks evaluate one batch before the job counts on them.

        ``facts`` are those of a learner of one process. Raises errors of the group, and of the
        user's code.
        """
        self._facts = facts
        self._rehearse_together()

    def _rehearse_together(self) -> list[str]:
        self._start_ranks()
        with self._together():
            self._ranks.begin(RankEvaluation(rehearses=True))
            names = self._rehearse_own()
            self._ranks.metrics()
        return names

    def shift(self, shifts: Iterable[tuple[ShardRange, Floats]]) -> None:
        for part, floats in shifts:
            if self._ranks.running:
                self._ranks.shift(part.start, floats)
            super().shift([(part, floats)])

    def close(self) -> None:
        self._ranks.stop()
        super().close()

    def train(self, base: Base, *args: Any, **options: Any) -> Trained:
        self._start_ranks()
        return super().train(base, *args, **options)

    def _train_interval(
        self,
        interval: SampleRange,
        loaded: tuple[Floats, Tensor] | None,
        asynchrony: float,
        after_step: Callable[[], bool],
    ) -> Interval:
        with self._together():
            if loaded is None and self._shared is None:
                # The others are new.
                loaded = self._model.read()
            if loaded is not None:
                self._ranks.load(*loaded)
            order = self._order(interval, asynchrony)
            self._ranks.begin(order)
            self._shared = self.optimizer
            following = iter(order.following)
            trained = self._steps(interval, following, self._leads(after_step))
            whole = self._ranks.end(_part(self, trained))
        if math.isnan(whole.checksum):
            # Without the same state, gradients of one would be steps of another.
            self._ranks.stop()
        return Interval(whole.samples, trained.steps, whole.loss_sum)

    def evaluate(self, floats: Floats, integers: Tensor, **options: Any) -> dict[str, float]:
        self._start_ranks()
        return super().evaluate(floats, integers, **options)

    def _evaluate_loaded(
        self,
        vectors: tuple[Floats, Tensor],
        after_step: Callable[[], bool],
    ) -> list[Metrics]:
        at_once = evaluates_at_once(self.task)
        if at_once and not self.sharded:
            return super()._evaluate_loaded(vectors, after_step)
        with self._together():
            self._ranks.load(*vectors)
            self._ranks.begin(RankEvaluation())
            own = self._evaluate_own(self._leads(after_step))
            others = self._ranks.metrics()
        # Or each has evaluated the whole data set.
        return [own] if at_once else [own, *others]

    def _leads(self, after_step: Callable[[], bool]) -> Callable[[], bool]:
        def lead() -> bool:
            stop = after_step()
            self._ranks.step(stop=stop)
            return stop

        return lead

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Stop the others at an error: they wait for this one."""
        try:
            yield
        except BaseException:
            self._ranks.stop()
            raise

    def _start_ranks(self) -> None:
        if self._ranks.running:
            return
        assert self._facts is not None
        with self._together():
            floats, device = self.layout.floats, str(self.device)
            self._ranks.start(self._facts, floats, device, sharded=self.sharded)
            assert self._ranks.group is not None
            self._shared = None
            self.join(self._ranks.group)

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
        """Return the state of the optimizer and its corrections for the other ranks.

        A new optimizer of a sharded model has none: each rank has its own part.
        """
        assert self.optimizer is not None
        if self.sharded:
            return b""
        out = io.BytesIO()
        moments = self.member.moments if self.member else None
        noise = moments.state() if moments else {}
        torch.save({"optimizer": self.optimizer.state_dict(), "noise": noise}, out)
        return out.getvalue()


class FollowingLearner(_RankedLearner):
    """A further rank's learner."""

    def follow(self, order: RankInterval, after_step: Callable[[], bool]) -> RankPart:
        """Train this rank's part of an interval."""
        if order.optimizer is not None:
            self._divergences = order.divergences
            self.optimizer = None
            self.start_subtask()
            if order.optimizer:
                self._load_optimizer(order.optimizer)
        if self.member is not None and order.batch is not None:
            self.member.assign(order.batch)
        if self._momenta is not None:
            self._momenta.follow(order.asynchrony)
        return _part(self, self._steps(order.samples, iter(order.following), after_step))

    def follow_evaluation(self, after_step: Callable[[], bool], *, rehearses: bool) -> Metrics:
        """Evaluate this rank's part of the validation set; only the first batch if it rehearses."""
        if rehearses:
            return dict.fromkeys(self._rehearse_own(), 0.0), False
        return self._evaluate_own(after_step)

    def _load_optimizer(self, data: bytes) -> None:
        assert self.optimizer is not None
        # It comes from the same user's code.
        state = torch.load(io.BytesIO(data), map_location=self.device, weights_only=False)
        load_state(self.optimizer, state["optimizer"])
        if self.member is not None and self.member.moments is not None:
            self.member.moments.load_state(state["noise"])


def _part(learner: _RankedLearner, trained: Interval) -> RankPart:
    return RankPart(trained.samples, trained.loss_sum, learner.model.checksum())
