"""Simulation of a job in one process, with simulated machines and a simulated clock.

Learners, encodings and the parameter server's blending are the product's own; network, machines
and time are simulated. It shows how a rule, a push interval, the number of workers or a history
of evictions affects accuracy. The same seed gives the same result.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import Any

from vcasgd.bench.presence import Life
from vcasgd.errors import SpecError
from vcasgd.parameter_server.model_state import ModelState, ShardConfig
from vcasgd.spec.job import JobSpec
from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot, encode_integers
from vcasgd.store.tensors.updates import Header
from vcasgd.task.task import Task
from vcasgd.worker.learner import Base, Learner

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Conditions:
    """Simulated conditions.

    ``seconds_per_sample`` is the speed of an average machine; each interval's time is multiplied
    by a log-normal factor with shape ``spread`` and mean 1. ``latency`` is the seconds from the
    end of an interval until its update is blended; its worker continues to train meanwhile.
    """

    lives: Sequence[Life]
    seconds_per_sample: float = 0.001
    spread: float = 0.2
    latency: float = 0.0
    seed: int = 0


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

    ``samples_lost`` were trained, lost with an evicted machine, and trained again.
    """

    points: list[Point] = field(default_factory=list)
    seconds: float = 0.0
    updates: int = 0
    bytes_pushed: int = 0
    samples_lost: int = 0
    machines_lost: int = 0
    staleness_mean: float = 0.0
    staleness: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Worker:
    """One lifetime of a machine."""

    life: Life
    rng: random.Random
    learner: Learner | None = None
    subtask: int | None = None
    position: int = 0


@dataclass(frozen=True)
class _Interval:
    """Current interval of a worker: samples up to ``stop``, trained from ``base``."""

    worker: _Worker
    stop: int
    version: int
    base: Base


class Simulation:
    """Event-driven simulation of a whole job.

    :meth:`run` raises the errors of the user's code, and :class:`SpecError` if no machine is left
    before the job ends.
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
        self._task = make_task()
        self._conditions = conditions
        self._evaluate_every = evaluate_every
        self._on_point = on_point
        #: Learner for evaluations only.
        self._evaluator = Learner(spec, self._task, "cpu")
        self._facts = self._evaluator.facts(1)
        self._model = self._new_model()
        plan = self._evaluator.plan
        self._waiting = deque(range(plan.total_subtasks))
        self._idle: list[_Worker] = []
        #: End of the pushed samples of each subtask, blended or not yet.
        self._pushed: dict[int, int] = {}
        self._now = 0.0
        self._numbers = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        for nth, life in enumerate(self._conditions.lives):
            worker = _Worker(life, random.Random(f"{self._conditions.seed}/{nth}"))
            self._at(life.start, partial(self._start, worker))
        while not self._model.record.complete:
            if not self._agenda:
                raise SpecError("trace: all machines are gone before the job ends", field="trace")
            self._now, _, action = heapq.heappop(self._agenda)
            action()
        totals = self._model.meta.totals
        self.outcome.seconds = self._now
        self.outcome.updates = totals.updates
        self.outcome.staleness_mean = totals.staleness_mean
        self.outcome.staleness = totals.staleness
        return self.outcome

    # -- workers -------------------------------------------------------------------------------

    def _start(self, worker: _Worker) -> None:
        """Start the next interval of a worker, or make it idle if no subtask is left."""
        if self._now >= worker.life.stop:
            return
        if worker.subtask is None and not self._lease(worker):
            self._idle.append(worker)
            return
        assert worker.subtask is not None
        learner = self._learner(worker)
        stop = learner.interval_stop(worker.subtask, worker.position)
        model = self._model
        interval = _Interval(
            worker,
            stop,
            model.meta.version,
            Base(model.weights.clone(), model.integers.clone()),
        )
        ready = self._now + self._duration(worker, stop - worker.position)
        if ready > worker.life.stop:
            self._at(worker.life.stop, lambda: self._die(interval))
        else:
            self._at(ready, lambda: self._finish(interval))

    def _lease(self, worker: _Worker) -> bool:
        if not self._waiting:
            return False
        worker.subtask = self._waiting.popleft()
        worker.position = self._pushed.get(worker.subtask, 0)
        self._learner(worker).start_subtask()
        return True

    def _learner(self, worker: _Worker) -> Learner:
        if worker.learner is None:
            worker.learner = Learner(self._spec, self._task, "cpu")
        return worker.learner

    def _duration(self, worker: _Worker, samples: int) -> float:
        spread = self._conditions.spread
        # The shift gives the factor a mean of 1.
        factor = math.exp(worker.rng.gauss(-spread * spread / 2, spread))
        return samples * self._conditions.seconds_per_sample * factor

    def _finish(self, interval: _Interval) -> None:
        worker, subtask = interval.worker, interval.worker.subtask
        assert subtask is not None
        learner, start = self._learner(worker), worker.position
        trained = learner.train(
            interval.base,
            subtask,
            start,
            interval.stop,
            should_stop=lambda: False,
            on_step=lambda: None,
        )
        (part,) = learner.cut(1).parts
        last = learner.is_last(subtask, trained.stop)
        encoded = learner.encoded(part, trained.update, last=last)
        payload = b"".join(encoded.chunks(CHUNK_BYTES))
        header = Header(
            update=f"u{next(self._numbers)}",
            worker="w",
            subtask=subtask,
            start=start,
            stop=trained.stop,
            base=interval.version,
            token=0,
            codec=encoded.codec,
            size=len(payload),
            layout=learner.layout_digest,
            integers=encode_integers(trained.integers),
            loss_sum=trained.loss_sum,
        )
        self._pushed[subtask] = worker.position = trained.stop
        if trained.stop == learner.plan.size(subtask):
            worker.subtask = None
        if self._conditions.latency:
            self._at(self._now + self._conditions.latency, lambda: self._blend(header, payload))
        else:
            self._blend(header, payload)
        self._start(worker)

    def _die(self, interval: _Interval) -> None:
        worker = interval.worker
        assert worker.subtask is not None
        self._waiting.appendleft(worker.subtask)
        self.outcome.machines_lost += 1
        self.outcome.samples_lost += interval.stop - worker.position
        worker.learner = None
        for idle in self._idle:
            self._at(self._now, partial(self._start, idle))
        self._idle.clear()

    # -- the parameter server ------------------------------------------------------------------

    def _blend(self, header: Header, payload: bytes) -> None:
        model = self._model
        model.check(header)
        model.payload(header)[:] = payload
        model.inspect(header, model.payload(header), 0)
        model.blend(header.update, header, [])
        model.published(model.next_meta(token=1))
        self.outcome.bytes_pushed += len(payload)
        self._evaluate()

    def _evaluate(self) -> None:
        epochs = self._model.record.finished_epochs
        last = self.outcome.points[-1].epoch if self.outcome.points else 0
        due = epochs % self._evaluate_every == 0 or epochs == self._spec.epochs
        if epochs == last or not due:
            return
        metrics = self._evaluator.evaluate(
            self._model.weights,
            self._model.integers,
            should_stop=lambda: False,
            on_step=lambda: None,
        )
        samples = self._model.meta.totals.samples
        point = Point(epochs, self._now, samples, metrics)
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
        return ModelState(config, Snapshot(meta, Record()), floats)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._numbers), action))
