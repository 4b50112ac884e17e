"""A job in one process, on machines and a clock that are made up.

Learners, encodings and the parameter server's blending are those of a real job; the wire, the
machines and the time are not there. So it shows what a rule, a push interval, a number of
workers or a history of evictions does to accuracy, and the same seed gives the same result.
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
    """What a simulation makes up.

    ``seconds_per_sample`` of an average machine; each interval takes a log-normally distributed
    factor of it with the shape ``spread``. ``latency``: seconds from the end of an interval until
    its update is blended; its worker trains on meanwhile.
    """

    lives: Sequence[Life]
    seconds_per_sample: float = 0.001
    spread: float = 0.2
    latency: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """The model at the end of an epoch: means of the task's metrics over the validation data."""

    epoch: int
    seconds: float
    samples: int
    metrics: dict[str, float]


@dataclass
class Outcome:
    """``samples_lost``: trained, and trained again by somebody else after an eviction."""

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
    """One life of a machine; a machine that comes back is a new one."""

    life: Life
    chance: random.Random
    learner: Learner | None = None
    subtask: int | None = None
    position: int = 0


@dataclass(frozen=True)
class _Interval:
    """What a worker is at: samples up to ``stop``, from the version ``base``."""

    worker: _Worker
    stop: int
    version: int
    base: Base


class Simulation:
    """Runs to the end of the job. Raises what the user's code raises, and :class:`SpecError`
    where machines are gone before the end."""

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
        #: evaluates; never trains
        self._judge = Learner(spec, self._task, "cpu")
        self._facts = self._judge.facts(1)
        self._blender = self._new_blender()
        plan = self._judge.plan
        self._waiting = deque(range(plan.total_subtasks))
        self._idle: list[_Worker] = []
        #: up to where the pushed updates of a subtask reach, blended or still on their way
        self._pushed: dict[int, int] = {}
        self._now = 0.0
        self._numbers = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        for nth, life in enumerate(self._conditions.lives):
            worker = _Worker(life, random.Random(f"{self._conditions.seed}/{nth}"))
            self._at(life.start, partial(self._begin, worker))
        while not self._blender.record.complete:
            if not self._agenda:
                raise SpecError("trace: all machines are gone before the job's end", field="trace")
            self._now, _, action = heapq.heappop(self._agenda)
            action()
        totals = self._blender.meta.totals
        self.outcome.seconds = self._now
        self.outcome.updates = totals.updates
        self.outcome.staleness_mean = totals.staleness_mean
        self.outcome.staleness = totals.staleness
        return self.outcome

    # -- workers -------------------------------------------------------------------------------

    def _begin(self, worker: _Worker) -> None:
        """The next interval of a worker; it is idle where no subtask is left."""
        if self._now >= worker.life.stop:
            return
        if worker.subtask is None and not self._lease(worker):
            self._idle.append(worker)
            return
        assert worker.subtask is not None
        learner = self._learner(worker)
        stop = learner.interval_stop(worker.subtask, worker.position)
        blender = self._blender
        interval = _Interval(
            worker,
            stop,
            blender.meta.version,
            Base(blender.weights.clone(), blender.integers.clone()),
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
        # of mean 1
        factor = math.exp(worker.chance.gauss(-spread * spread / 2, spread))
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
        self._begin(worker)

    def _die(self, interval: _Interval) -> None:
        worker = interval.worker
        assert worker.subtask is not None
        self._waiting.appendleft(worker.subtask)
        self.outcome.machines_lost += 1
        self.outcome.samples_lost += interval.stop - worker.position
        worker.learner = None
        for idle in self._idle:
            self._at(self._now, partial(self._begin, idle))
        self._idle.clear()

    # -- the parameter server ------------------------------------------------------------------

    def _blend(self, header: Header, payload: bytes) -> None:
        blender = self._blender
        blender.check(header)
        blender.payload(header)[:] = payload
        blender.inspect(header, blender.payload(header), 0)
        blender.blend(header.update, header, [])
        blender.published(blender.next_meta(token=1))
        self.outcome.bytes_pushed += len(payload)
        self._evaluate()

    def _evaluate(self) -> None:
        epochs = self._blender.record.finished_epochs
        last = self.outcome.points[-1].epoch if self.outcome.points else 0
        due = epochs % self._evaluate_every == 0 or epochs == self._spec.epochs
        if epochs == last or not due:
            return
        metrics = self._judge.evaluate(
            self._blender.weights,
            self._blender.integers,
            should_stop=lambda: False,
            on_step=lambda: None,
        )
        samples = self._blender.meta.totals.samples
        point = Point(epochs, self._now, samples, metrics)
        self.outcome.points.append(point)
        self._on_point(point)

    def _new_blender(self) -> ModelState:
        floats, integers = self._judge.initial()
        recipe = ShardConfig(self._spec, self._facts)
        meta = Meta(
            version=0,
            token=0,
            floats=recipe.part.floats,
            parameters=recipe.part.parameters,
            layout=recipe.layout_digest,
            integers=encode_integers(integers),
        )
        return ModelState(recipe, Snapshot(meta, Record()), floats)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._numbers), action))
