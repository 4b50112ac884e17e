"""One simulated machine and its worker: its speed, its base, and its current interval."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vcasgd.fleet.histories import Life
from vcasgd.learning.encodings.encoder import Encoder
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import counted
from vcasgd.store.tensors.header import Header
from vcasgd.worker.interval import Base, Trained, continued, encoded_counters, with_counters
from vcasgd.worker.learner import Learner
from vcasgd.worker.update_queue import MAX_UNAPPLIED

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class SimulatedInterval:
    """An interval in progress: samples up to ``stop``, trained from a base."""

    stop: int
    seconds: float
    base: Base


class SimulatedWorker:
    """Bookkeeping of one lifetime of a machine, as :class:`~vcasgd.worker.trainer.Trainer` does it.

    ``speed`` divides the time of every interval; ``jitter`` is the shape of a log-normal factor
    with mean 1 that each interval draws from ``rng``.
    """

    def __init__(
        self, name: str, life: Life, speed: float, jitter: float, rng: random.Random
    ) -> None:
        self.name = name
        self.life = life
        self._speed = speed
        self._jitter = jitter
        self._rng = rng
        self.learner: Learner | None = None
        self._encoder: Encoder | None = None
        #: Updates, float32 [floats], from which the next interval continues, with their numbers:
        #: the last one, or all that a worker's own copy has.
        self._own: list[tuple[int, Tensor, Tensor | None]] = []
        #: Its own copy while it is alone, and the version that will have all of it.
        self._copy: Base | None = None
        self._copied = 0
        self.subtask: int | None = None
        #: End of the samples of the subtask that are trained.
        self.position = 0
        #: Updates that were pushed, that aren't applied yet, and that are in ``fetched``.
        self.pushed = self.unapplied = self.contained = 0
        #: True while the worker waits until an update is applied.
        self.waits = False
        self.fetched: Base | None = None
        #: Its version and writer.
        self.stored: tuple[int, int] | None = None
        #: True if ``fetched`` is meant for the next interval.
        self.prefetched = False
        #: Seconds per sample of the last interval; None before the first one.
        self._pace: float | None = None

    @property
    def full(self) -> bool:
        """True if the worker must not train, because too many updates are unapplied."""
        return self.unapplied >= self._most_unapplied

    @property
    def prefetches(self) -> bool:
        """True if the worker need not wait for an update after its current interval.

        A snapshot from before that wait would be too old, so it isn't prefetched.
        """
        return self.unapplied + 1 < self._most_unapplied

    @property
    def _most_unapplied(self) -> int:
        return self.learner.max_unapplied if self.learner else MAX_UNAPPLIED

    def fetch(self, snapshot: Base, stored: tuple[int, int]) -> None:
        """Receive a snapshot, which contains all updates that are applied."""
        self.fetched, self.stored = snapshot, stored
        self.contained = self.pushed - self.unapplied

    def interval(self, stop: int, seconds_per_sample: float) -> SimulatedInterval:
        """Return the next interval; its duration is drawn."""
        assert self.fetched is not None
        assert self.learner is not None
        base, parts = self.fetched, self.learner.cut(1).parts
        self._own = [own for own in self._own if own[0] > self.contained]
        if (copy := self.adopted(base.version, self.pushed - self.contained)) is not None:
            base = replace(base, floats=copy.floats, integers=copy.integers, continues=True)
        else:
            for _, update, counters in self._own:
                base = continued(base, update, parts, out=torch.empty(len(base.floats)))
                base = with_counters(base, self.learner.layout, counters)
        # The shift gives the factor a mean of 1.
        factor = math.exp(self._rng.gauss(-self._jitter * self._jitter / 2, self._jitter))
        seconds = (stop - self.position) * seconds_per_sample * factor / self._speed
        return SimulatedInterval(stop, seconds, base)

    def expected_seconds(self, interval: SimulatedInterval) -> float | None:
        """Return the duration that the worker expects; None in its first interval."""
        return None if self._pace is None else self._pace * (interval.stop - self.position)

    def train(self, interval: SimulatedInterval, name: str) -> tuple[Header, bytes]:
        """Train the interval, and return its update ``name`` as it is pushed.

        Raises :class:`~vcasgd.errors.UserCodeError`.
        """
        learner, subtask, start = self.learner, self.subtask, self.position
        assert learner is not None
        assert subtask is not None
        trained = learner.train(interval.base, subtask, start, interval.stop)
        member = learner.member
        if member is not None:
            member.measure(interval.seconds / max(trained.steps, 1))
        (part,) = learner.cut(1).parts
        last = learner.is_last(subtask, trained.stop)
        if self._encoder is None:
            self._encoder = Encoder(learner.spec.update, learner.layout, part)
        encoded = self._encoder.encode(trained.update, last=last)
        counters = counted(learner.layout, interval.base.integers, trained.integers)
        self._keep_copy(interval, trained, part)
        if member is None or not member.keeps_copy:
            self._own.clear()
        if member is not None and (member.overlaps or member.keeps_copy):
            self._own.append((self.pushed + 1, trained.update[:], counters))
        payload = b"".join(encoded.chunks(CHUNK_BYTES))
        header = Header(
            update=name,
            worker=self.name,
            subtask=subtask,
            start=start,
            stop=trained.stop,
            base=interval.base.version,
            token=0,
            codec=encoded.codec,
            size=len(payload),
            layout=learner.findings.layout_digest,
            integers=encoded_counters(counters),
            loss_sum=trained.loss_sum,
            skipped=trained.skipped,
            weight=trained.weight,
            batch=member.batch if member else 0.0,
            step_seconds=member.step_seconds if member else 0.0,
            exchange_seconds=member.exchange_seconds if member else 0.0,
        )
        self._pace = interval.seconds / (trained.stop - start)
        self.position = trained.stop
        self.pushed += 1
        self.unapplied += 1
        if trained.stop == learner.plan.size(subtask):
            self.subtask = None
        return header, payload

    def adopted(self, version: int, lacking: int) -> Base | None:
        """Return the worker's own copy if a version that lacks so many of its updates has nothing
        else than the others."""
        return self._copy if version + lacking == self._copied else None

    def _keep_copy(self, interval: SimulatedInterval, trained: Trained, part: ShardRange) -> None:
        """Keep the model at the end of an interval, if it is the worker's own copy."""
        learner, base = self.learner, interval.base
        assert learner is not None
        member = learner.member
        self._copy = None
        alone = member is not None and member.keeps_copy and not member.takes_turns
        if not alone or not learner.adopts_own_copy:
            return
        if not base.continues:
            self._copied = base.version + len(self._own)
        floats = torch.empty(len(base.floats))
        learner.read_part(part, floats)
        self._copy, self._copied = Base(floats, trained.integers), self._copied + 1
