"""Simulation of a job in one process, with simulated machines and a simulated clock.

Learners, encodings and the parameter server's blending are the product's own; network, machines
and time are simulated. It shows how a rule, a push interval, the number of workers or a history
of evictions affects accuracy. The same seed gives the same result.

A simulated worker has the timing of a real one: it fetches the base of its next interval before
the current one ends, so that base lacks the worker's own latest update; it trains while updates
are in flight, and waits if two are unapplied. Machines are lost without a notice, and settings
that the controller tunes keep their initial values.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any

from torch import Tensor

from vcasgd.errors import InvalidUpdate, LoopEnded, NonFiniteLoss, SpecError
from vcasgd.fleet.histories import Life
from vcasgd.learning.rules import make_rule
from vcasgd.parameter_server.blend import ModelState, ShardConfig
from vcasgd.session.script import LoopInThread
from vcasgd.simulation.worker import SimulatedInterval, SimulatedWorker
from vcasgd.spec.job import JobSpec
from vcasgd.store.tensors.chunks import path
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot, encode_integers
from vcasgd.task.task import Task
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner
from vcasgd.worker.member import SHARING_SECONDS, Member
from vcasgd.worker.shard_link import FETCH_MARGIN


@dataclass(frozen=True)
class Conditions:
    """Simulated conditions.

    ``seconds_per_sample`` is the speed of an average machine. Each machine has a constant factor
    of it, log-uniform from 1/√r to √r with r = ``speed_range``. Each interval's time is also
    multiplied by a log-normal factor with shape ``spread`` and mean 1. ``latency`` is the seconds
    from the end of an interval until its update is blended, and ``fetch_seconds`` the duration of
    a fetch; workers train meanwhile. A machine trains ``boot_seconds`` after its life begins.
    """

    lives: Sequence[Life]
    seconds_per_sample: float = 0.001
    spread: float = 0.2
    latency: float = 0.0
    seed: int = 0
    speed_range: float = 1.0
    fetch_seconds: float = 0.0
    boot_seconds: float = 0.0

    def speed(self, nth: int) -> float:
        """Return the speed of the nth machine, relative to an average one."""
        draw = random.Random(f"{self.seed}/{nth}/speed").uniform(-0.5, 0.5)
        return math.exp(draw * math.log(self.speed_range))


@dataclass(frozen=True)
class Point:
    """Means of the task's metrics over the validation data at the end of an epoch."""

    epoch: int
    seconds: float
    samples: int
    metrics: dict[str, float]


@dataclass
class Outcome:
    """Result of a simulation.

    ``machine_seconds`` is the time of all machines until the end of the job, boots included.
    ``samples_lost`` were trained, lost with an evicted machine, and trained again. ``divergence``
    is the reason if the loss or the model became infinite or NaN, which ends the job early, and
    ``ended`` why a loop ended by itself.
    """

    points: list[Point] = field(default_factory=list)
    seconds: float = 0.0
    updates: int = 0
    bytes_pushed: int = 0
    bytes_fetched: int = 0
    samples_lost: int = 0
    machines_lost: int = 0
    machine_seconds: float = 0.0
    staleness_mean: float = 0.0
    staleness: dict[str, int] = field(default_factory=dict)
    divergence: str | None = None
    ended: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Simulation:
    """Event-driven simulation of a whole job.

    :meth:`run` raises the errors of the user's code, and :class:`SpecError` if no machine is left
    before the job ends. A training that diverges is an outcome, not an error.
    """

    def __init__(
        self,
        spec: JobSpec,
        make_task: Callable[[], Task],
        conditions: Conditions,
        *,
        evaluate_every: int = 1,
        on_point: Callable[[Point], None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._make_task = make_task
        self._tasks: list[Task] = []
        self._conditions = conditions
        self._evaluate_every = evaluate_every
        self._on_point = on_point
        #: Learner for evaluations only.
        self._evaluator = self._new_learner()
        self._facts = self._evaluator.facts(1)
        self._model = self._new_model()
        self._plan = self._evaluator.plan
        self._waiting = deque(range(self._plan.total_subtasks))
        self._idle: list[SimulatedWorker] = []
        #: Workers that train, and how many may.
        self._training: set[str] = set()
        self._most_workers = self._facts.most_workers(spec) or math.inf
        #: End of the pushed samples of each subtask, blended or not yet.
        self._pushed: dict[int, int] = {}
        self._now = 0.0
        #: Finished epochs.
        self._epoch = 0
        self._numbers = count()
        self._rounds = make_rule(spec.update).rounds
        #: Workers of the blended updates that aren't published yet.
        self._pushed_by: list[SimulatedWorker] = []
        #: Takes the updates that are left to the next round.
        self._left: list[Callable[[], None]] = []
        #: Second moments that workers share, and the steps behind them.
        self._moments: tuple[Tensor, int] | None = None
        #: When they are written next.
        self._sharing_at = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        try:
            return self._run()
        finally:
            for task in self._tasks:
                if isinstance(task, LoopInThread):
                    task.close()

    def _run(self) -> Outcome:
        for nth, life in enumerate(self._conditions.lives):
            ready = life.start + self._conditions.boot_seconds
            if ready < life.stop:
                self._at(ready, partial(self._continue, self._new_worker(nth, life)))
        try:
            self._run_agenda()
        except NonFiniteLoss as error:
            self.outcome.divergence = error.message
        except InvalidUpdate as error:
            if error.reason != "non-finite":
                raise
            self.outcome.divergence = error.message
        totals = self._model.meta.totals
        lived = [one for one in self._conditions.lives if one.start < self._now]
        self.outcome.seconds = self._now
        self.outcome.machines_lost = sum(one.stop <= self._now for one in lived)
        self.outcome.machine_seconds = sum(min(one.stop, self._now) - one.start for one in lived)
        self.outcome.updates = totals.updates
        self.outcome.staleness_mean = totals.staleness_mean
        self.outcome.staleness = totals.staleness
        return self.outcome

    def _run_agenda(self) -> None:
        while not self._model.record.complete:
            if not self._agenda and self.outcome.ended is not None:
                self._end_early(self.outcome.ended)
                return
            if not self._agenda:
                raise SpecError("trace: all machines are gone before the job ends", field="trace")
            self._now, _, action = heapq.heappop(self._agenda)
            action()
        self.outcome.ended = None  # Other workers trained the rest.

    def _end_early(self, why: str) -> None:
        """Evaluate what loops have trained that all ended before the job."""
        samples = self._model.meta.totals.samples
        if not samples:
            raise LoopEnded(why)
        if not self.outcome.points or self.outcome.points[-1].samples < samples:
            self._measure()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._numbers), action))

    # -- workers -------------------------------------------------------------------------------

    def _new_learner(self) -> Learner:
        """Return a learner with a task of its own, as each worker has one."""
        task = self._make_task()
        if self._tasks and not isinstance(task, LoopInThread):
            # All learners are in this process, and need the data only once.
            vars(task)["dataset"] = vars(self._tasks[0])["dataset"]
        elif not isinstance(task, LoopInThread):
            vars(task)["dataset"] = cache(task.dataset)
        self._tasks.append(task)
        return Learner(self._spec, task, "cpu")

    def _new_worker(self, nth: int, life: Life) -> SimulatedWorker:
        conditions = self._conditions
        rng = random.Random(f"{conditions.seed}/{nth}")
        return SimulatedWorker(f"w{nth}", life, conditions.speed(nth), conditions.spread, rng)

    def _continue(self, worker: SimulatedWorker) -> None:
        """Start a worker's next interval, unless it has to end, to wait, or to be idle."""
        if self._now >= worker.life.stop:
            self._lose(worker, 0)
        elif worker.subtask is None and not self._lease(worker):
            self._idle.append(worker)
        elif worker.full:
            worker.waits = True
        else:
            self._start_interval(worker)

    def _lease(self, worker: SimulatedWorker) -> bool:
        if worker.name not in self._training and len(self._training) >= self._most_workers:
            return False
        ahead = self._model.record.finished_epochs + self._spec.max_epoch_lead
        if not self._waiting or self._plan.epoch_of(self._waiting[0]) > ahead:
            return False
        if worker.learner is None:
            worker.learner = self._new_learner()
            worker.learner.findings.follow(self._facts)
        worker.subtask = self._waiting.popleft()
        self._training.add(worker.name)
        worker.position = self._pushed.get(worker.subtask, 0)
        worker.learner.start_subtask()
        return True

    def _start_interval(self, worker: SimulatedWorker) -> None:
        assert worker.learner is not None
        assert worker.subtask is not None
        if not worker.prefetched:
            self._fetch(worker)
        worker.prefetched = False
        assert worker.fetched is not None
        if (member := worker.learner.member) is not None:
            member.measure_exchange(worker.contained, self._now)
            member.follow(worker.fetched)
            self._adopt_moments(member)
        stop = worker.learner.interval_stop(worker.subtask, worker.position)
        interval = worker.interval(stop, self._conditions.seconds_per_sample)
        ready = self._now + interval.seconds
        if ready > worker.life.stop:
            lost = stop - worker.position
            self._at(worker.life.stop, lambda: self._lose(worker, lost))
            return
        expected = worker.expected_seconds(interval)
        if expected is not None:
            early = self._now + expected - FETCH_MARGIN * self._conditions.fetch_seconds
            self._at(min(max(early, self._now), ready), lambda: self._prefetch(worker))
        self._at(ready, lambda: self._finish(worker, interval))

    def _prefetch(self, worker: SimulatedWorker) -> None:
        if worker.prefetches:
            self._fetch(worker)
            worker.prefetched = True

    def _fetch(self, worker: SimulatedWorker) -> None:
        """Give a worker the present snapshot, which it receives in its encoding."""
        model, meta = self._model, self._model.meta
        if worker.stored == (meta.version, meta.token):
            return
        halves = self._evaluator.halves
        weights = model.followed.bfloat16().float() if halves else model.followed.clone()
        base = Base(weights, model.integers.clone(), version=meta.version, round=meta.round)
        adopted = worker.adopted(meta.version, worker.unapplied) is not None
        way = () if adopted else path(meta, worker.stored)
        worker.fetch(base, (meta.version, meta.token))
        size = weights.numel() * (2 if halves else 4)
        self.outcome.bytes_fetched += size if way is None else sum(step.size for step in way)

    def _finish(self, worker: SimulatedWorker, interval: SimulatedInterval) -> None:
        try:
            header, payload = worker.train(interval, f"u{next(self._numbers)}")
        except LoopEnded as ended:
            self.outcome.ended = ended.message
            self._lose(worker, 0)
            return
        if worker.learner is not None and worker.learner.member is not None:
            worker.learner.member.end(worker.pushed, self._now)
            self._share_moments(worker.learner.member)
        self._pushed[header.subtask] = header.stop
        self.outcome.bytes_pushed += len(payload)
        # Even without latency, the worker starts its next interval first.
        applied = self._now + self._conditions.latency
        self._at(applied, lambda: self._apply(worker, header, payload))
        self._continue(worker)

    def _adopt_moments(self, member: Member) -> None:
        if self._moments is not None and member.lacking:
            member.adopt(*self._moments)

    def _share_moments(self, member: Member) -> None:
        """Let a worker share its second moments if it is its turn."""
        if not member.can_share or self._now < self._sharing_at:
            return
        moments, made = member.shared()
        self._moments = moments.bfloat16().float(), made
        self._sharing_at = self._now + SHARING_SECONDS

    def _lose(self, worker: SimulatedWorker, samples: int) -> None:
        """End a worker with its machine, and return its subtask."""
        self._training.discard(worker.name)
        if worker.subtask is None:
            self._wake()
            return
        self._waiting.appendleft(worker.subtask)
        worker.subtask = worker.learner = None
        self.outcome.samples_lost += samples
        self._wake()

    def _wake(self) -> None:
        for idle in self._idle:
            self._at(self._now, partial(self._continue, idle))
        self._idle.clear()

    # -- the parameter server ------------------------------------------------------------------

    def _apply(self, worker: SimulatedWorker, header: Header, payload: bytes) -> None:
        """Blend an update, and publish it, or the round that it completes."""
        model = self._model
        if model.belongs_to_next(header):
            self._left.append(partial(self._apply, worker, header, payload))
            return
        model.check(header)
        model.payload(header)[:] = payload
        model.inspect(header, model.payload(header), 0)
        model.blend(header.update, header, [])
        self._pushed_by.append(worker)
        model.members.arrive(header, self._now)
        self._end_round()
        if model.members.deadline is not None:
            self._at(model.members.deadline, self._end_round)

    def _end_round(self) -> None:
        """Publish unless more workers are expected; let those continue that waited for it."""
        model = self._model
        if not self._pushed_by or not (
            not self._rounds or model.record.complete or model.members.complete(self._now)
        ):
            return
        model.end_batch()
        model.published(model.next_meta(token=1))
        applied, self._pushed_by = self._pushed_by, []
        if self._evaluate():
            # A new epoch can be leased.
            self._wake()
        for worker in applied:
            worker.unapplied -= 1
            if worker.waits:
                worker.waits = worker.prefetched = False
                self._continue(worker)
        left, self._left = self._left, []
        for take in left:
            take()

    def _evaluate(self) -> bool:
        """Evaluate the model if an epoch has ended and is due; return True if one has ended."""
        epochs = self._model.record.finished_epochs
        if epochs == self._epoch:
            return False
        self._epoch = epochs
        if epochs % self._evaluate_every and not self._model.record.complete:
            return True
        self._measure()
        return True

    def _measure(self) -> None:
        metrics = self._evaluator.evaluate(
            self._model.weights,
            self._model.integers,
            average=self._model.state if self._spec.ema else None,
        )
        samples = self._model.meta.totals.samples
        point = Point(self._epoch, self._now, samples, metrics)
        self.outcome.points.append(point)
        self._on_point(point)

    def _new_model(self) -> ModelState:
        floats, integers = self._evaluator.initial()
        config = ShardConfig(self._spec, self._facts)
        meta = Meta(
            version=0,
            token=0,
            floats=config.part.floats,
            parameters=config.part.parameters,
            layout=config.layout_digest,
            integers=encode_integers(integers),
        )
        return ModelState(config, Snapshot(meta, Record()), floats[:])
