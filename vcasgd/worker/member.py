"""A worker's part in the rounds of its job: its local batch, intervals, and optimizer's state."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.learning import second_moments
from vcasgd.learning.local_batch import MIN_BATCH, LocalBatch
from vcasgd.learning.local_moments import LocalMoments
from vcasgd.learning.vector import new_vector
from vcasgd.store.tensors.snapshot import RoundFacts
from vcasgd.worker.interval import Base

#: Seconds of an interval of a worker that is alone. No other worker changes the model meanwhile, so
#: it only has to push what it can't afford to lose.
ALONE_SECONDS = 1.0
#: Most seconds of work that a lost worker takes with it, unless an exchange takes longer. With slow
#: exchanges, an interval of a worker that is alone is as long, because each exchange takes
#: processors and memory bandwidth from the training.
MAX_LOST_SECONDS = 10.0
#: Most local steps of a round that the workers choose themselves. Longer rounds cost too much
#: quality for the time that they save.
MAX_STEPS = 16
#: Seconds from which on an exchange is slow: a worker that is alone makes fewer, and several may
#: keep copies of their own.
SLOW_EXCHANGE = 0.1
#: An exchange of several workers as a multiple of a local step from which on they keep copies of
#: their own, and the one from which on they don't any more.
TURNS_FROM, TURNS_UNTIL = 2**0.5, 1.0
#: Intervals of a worker that pushes parts in turn, as a multiple of a turn. They end with the turn.
TURNS_OF_INTERVAL = 2.0
#: Most turns in an exchange of the whole vector. Each ends an interval, which takes some
#: milliseconds, however few shards there are to push.
MAX_TURNS = 5
#: Share of its time for which a training that takes turns should at most stand still for them. Each
#: copies parts of the vector, and takes memory bandwidth from the training.
MAX_STALL = 0.03
#: Most seconds from one turn to the next for that, as a multiple of what a turn takes. Longer
#: rounds cost quality.
MAX_PAUSE = 4.0
#: Progress of a job from which on its steps may overlap with exchanges. Early in a job, steps are
#: long, consecutive ones can be opposed, and a gradient that is one step late adds to that.
OVERLAP_FROM = 0.5
#: Factor by which steps last longer than planned in an interval that ends early. All workers would
#: wait for one that is so slow, and smaller differences may be noise.
MUCH_SLOWER = 2.0
#: Last exchanges of which the shortest counts: it waited least for other workers.
EXCHANGES = 5
#: Steps of an optimizer before other workers take over its second moments.
MIN_STEPS = 20
#: Seconds between two times that a worker shares its second moments.
SHARING_SECONDS = 10.0


class Member:
    """Member of the rounds of a job with batches of ``job_batch`` samples, of which a local one has
    at least ``least``.

    ``workers`` is the number of workers that the job expects, and ``steps`` the number of local
    steps in an interval of so many workers: in all intervals if it is ``fixed``, otherwise until
    the workers know how long an exchange takes. ``large``: the vector is long enough to be
    exchanged in parts. ``most_alone`` is the most local steps of an interval of a worker that is
    alone. ``gradients``: rounds have one step, whose gradients are exchanged. ``exact``: versions
    are more precise than workers' copies, so every interval starts from a version. The rule is in
    :mod:`vcasgd.learning.rules`.
    """

    def __init__(
        self,
        job_batch: int,
        workers: int,
        steps: int,
        *,
        fixed: bool = False,
        large: bool = False,
        least: int = MIN_BATCH,
        most_alone: float = math.inf,
        gradients: bool = False,
        exact: bool = False,
    ) -> None:
        self._job_batch = job_batch
        self._least = min(least, job_batch)
        self._batch = LocalBatch(job_batch, workers, least)
        self._workers = workers
        self._gradients = gradients
        self._may_run_ahead = not exact
        if gradients:
            steps, fixed = 1, True
        self._steps = steps
        self._fixed = fixed
        self._large = large
        self._most_alone = most_alone
        #: Number of shards of the job's vector.
        self.shards = 1
        #: Facts of the last round.
        self._facts = RoundFacts()
        self._first_steps = steps
        self._alone = self._overlaps = False
        #: True if this worker keeps its own copy of the model, and never waits for an exchange.
        self.keeps_copy = False
        #: When the last turn began, and how long exchanges have stopped the training since then and
        #: during the turn before.
        self._turn_at, self._stalled, self._stalled_before = -math.inf, 0.0, 0.0
        self._progress = 0.0
        self._exchanges: deque[float] = deque(maxlen=EXCHANGES)
        #: When the intervals ended whose updates no base contained yet, by the update's number.
        self._ended: dict[int, float] = {}
        #: Name of an optimizer whose steps can't be made again with mean gradients.
        self.uncorrectable = ""
        #: Corrections of the present optimizer's moments.
        self.moments: LocalMoments | None = None
        #: The optimizer whose second moments are shared, if there is one.
        self._sharing: Optimizer | None = None

    @property
    def batch(self) -> float:
        """Mean number of samples in the local steps."""
        return self._batch.size

    def assign(self, batch: float) -> None:
        """Take over the local batch of the first process of a worker with several ranks."""
        self._batch.size = batch

    @property
    def share(self) -> float:
        """The local batch as a share of the job's, in (0, 1]."""
        return min(1.0, self._batch.size / self._job_batch)

    @property
    def step_seconds(self) -> float:
        """Duration of a local step; 0 if unknown."""
        return self._batch.step_seconds

    @property
    def overlaps(self) -> bool:
        """True if the next interval doesn't wait for the exchange of the last one.

        It continues from this worker's own copy, whose difference to the mean is made up for one
        interval later. After longer intervals, the copies would be too far apart.
        """
        return self._overlaps and self._progress >= OVERLAP_FROM

    @property
    def exchange_seconds(self) -> float:
        """Least time that one of the last exchanges took, in seconds; 0 if unknown."""
        return min(self._exchanges, default=0.0)

    def follow(self, base: Base) -> None:
        """Adapt to the round that made a base."""
        self._facts = facts = base.round
        self._alone = (facts.workers or self._workers) == 1
        if self._alone:
            self.keeps_copy = self._may_run_ahead and not self._gradients
        else:
            self.keeps_copy = (
                self._large and not self._fixed and takes_turns(facts, self.keeps_copy)
            )
        if not self._fixed:
            balanced = balanced_steps(facts)
            self._steps = balanced or self._first_steps
            self._overlaps = balanced == 1 and not self._alone and self._may_run_ahead
        elif facts.workers:
            # With fewer workers, each has a larger batch. Intervals of as many samples keep the
            # rounds as short, for newcomers and for what a lost worker loses.
            self._steps = fewer_steps(self._first_steps, facts.workers, self._workers)
        self._batch.follow(base.version, facts.workers, facts.batch, facts.step_seconds)

    def measure(self, step_seconds: float) -> None:
        """Record the mean duration of the local steps of an interval, in seconds."""
        self._batch.measure(step_seconds)

    def end(self, update: int, now: float) -> None:
        """Record that the interval ended whose update has this number, from 1."""
        self._ended[update] = now

    def measure_exchange(self, contained: int, now: float) -> None:
        """Record how long the exchange took of the last update that the newest base contains.

        It contains the updates up to the number ``contained``. An exchange lasts from the end of
        an interval until a base has its update. That of the first round doesn't count: it waited
        for workers that nobody knew, so that the next one would have many steps, early in the job.
        """
        done = [self._ended.pop(update) for update in sorted(self._ended) if update <= contained]
        if done and self._facts.workers:
            self._exchanges.append(now - done[-1])

    def measure_copy(self, seconds: float) -> None:
        """Record how long an exchange of this worker's copy takes, in seconds."""
        self._ended.clear()
        self._exchanges.append(seconds)

    def use(self, optimizer: Optimizer, *, keeps: bool = True) -> None:
        """Use a new optimizer; ``keeps`` is False if only for one subtask."""
        if self.moments is not None:
            # A task can return the same optimizer again.
            self.moments.close()
        # With mean gradients, its moments are those of the whole batch.
        self.moments = None if self._gradients else LocalMoments(optimizer)
        self._sharing = optimizer if keeps and second_moments.count(optimizer) else None

    @property
    def uncorrected(self) -> str:
        """Name of an optimizer with moments of a part of the job's batch; empty without one."""
        if self.share == 1:
            return ""
        return self.moments.uncorrected if self.moments else self.uncorrectable

    # -- second moments that outlive a worker --------------------------------------------------

    @property
    def lacking(self) -> int:
        """Number of second moments that a new optimizer lacks; 0 if it has its own, or none."""
        if self._sharing is None or second_moments.steps(self._sharing):
            return 0
        return second_moments.count(self._sharing)

    def adopt(self, moments: Tensor, made: int) -> bool:
        """Take over second moments; see :func:`vcasgd.learning.second_moments.adopt`."""
        assert self._sharing is not None
        return second_moments.adopt(self._sharing, moments, made)

    @property
    def can_share(self) -> bool:
        """True if other workers should take over this optimizer's second moments."""
        return self._sharing is not None and second_moments.steps(self._sharing) >= MIN_STEPS

    def shared(self) -> tuple[Tensor, int]:
        """Return the second moments for others, bfloat16 [n], and the steps that they are from."""
        assert self._sharing is not None
        count = second_moments.count(self._sharing)
        out = new_vector(-(-count // 2)).view(torch.bfloat16)[:count]
        second_moments.read(self._sharing, out)
        return out, second_moments.steps(self._sharing)

    # -- intervals -----------------------------------------------------------------------------

    @property
    def takes_turns(self) -> bool:
        """True if the worker keeps a copy, and exchanges parts of it in turn with others."""
        return self.keeps_copy and not self._alone

    @property
    def shards_of_turn(self) -> int:
        """Number of shards whose exchange takes about as long as a local step; at least
        1/:data:`MAX_TURNS` of all."""
        facts = self._facts
        if not facts.exchange_seconds:
            return self.shards
        count = int(self.shards * facts.step_seconds / facts.exchange_seconds)
        return min(self.shards, max(-(-self.shards // MAX_TURNS), count))

    def stall(self, seconds: float) -> None:
        """Record that the training stood still for an exchange beside it, in seconds."""
        self._stalled += seconds

    def may_start_turn(self, now: float) -> bool:
        """Return False while the last turn's share of the training's time is too large."""
        return now - self._turn_at >= self._pause(self._stalled)

    def _pause(self, stalled: float) -> float:
        """Return the seconds between two turns if the training stands still for so many in one.

        All turns of an exchange together lose at most :data:`MAX_LOST_SECONDS` of work.
        """
        most = min(MAX_PAUSE * self._seconds_of_turn, MAX_LOST_SECONDS / MAX_TURNS)
        return min(stalled / MAX_STALL, most)

    @property
    def _seconds_of_turn(self) -> float:
        return self.exchange_seconds * self.shards_of_turn / self.shards

    def start_turn(self, now: float) -> None:
        """Record that a turn begins."""
        self._turn_at, self._stalled_before, self._stalled = now, self._stalled, 0.0

    def begin(self, progress: float) -> None:
        """Start an interval at a progress of the job in [0, 1].

        From now on, the optimizer's state is that of the whole batch.
        """
        self._progress = progress
        if self.moments is not None:
            self.moments.follow(self.share)

    @property
    def crosses_batches(self) -> bool:
        """True if intervals may end within a sampler's own batches.

        Successive parts of one batch are alike. The correction of second moments would take that
        for the mean gradient, so its intervals have whole batches.
        """
        return self.share < 1 and not (self.moments and self.moments.corrects_noise)

    def interval_stop(self, position: int, size: int, *, even: bool = True) -> int:
        """Return where the next interval ends in a subtask of ``size`` samples.

        The rest of a subtask is cut into equal intervals, because the other workers would have to
        wait after a short one. ``even``: the order has batches of one size.
        """
        left = size - position
        if self.batch == self._job_batch:
            rest = self._rest_of_batch(position, left) if even else 0
            # The same batches as in an ordinary loop.
            whole = max(1, round(self._interval)) * self._job_batch
            return position + (rest if rest >= self._least else min(left, whole))
        intervals = min(round(left / (self._interval * self.batch)), left // self._least)
        return position + max(1, round(left / max(1, intervals)))

    def _rest_of_batch(self, position: int, left: int) -> int:
        """Return the samples of a step that ends a batch whose beginning several workers shared.

        A short rest is trained with the next batch, in two halves: a step of a few samples is as
        long as any other one, and has more noise. 0 behind whole batches.
        """
        batch = self._job_batch
        rest = -position % batch
        if rest == 0:
            return 0
        if left <= batch:
            return left
        return rest if 2 * rest >= batch else -(-min(rest + batch, left) // 2)

    @property
    def _interval(self) -> float:
        """Local steps of the next interval."""
        if self.takes_turns and self.step_seconds:
            turn = max(self._seconds_of_turn, self._pause(self._stalled_before))
            return max(1.0, TURNS_OF_INTERVAL * turn / self.step_seconds)
        fixed = self._fixed and not self._gradients
        if fixed or not self._alone or not self.step_seconds:
            return self._steps
        seconds = ALONE_SECONDS
        if self.keeps_copy and self.exchange_seconds >= SLOW_EXCHANGE:
            seconds = max(MAX_LOST_SECONDS, self.exchange_seconds)
        return max(1.0, min(seconds / self.step_seconds, self._most_alone))

    def batch_size(self, samples: int) -> int:
        """Return the size of the batches of an interval with ``samples``.

        It is the job's, or that of equal batches.
        """
        if self.batch == self._job_batch:
            return self._job_batch
        return -(-samples // max(1, min(round(samples / self.batch), samples // self._least)))


def fewer_steps(steps: int, workers: int, expected: int) -> int:
    """Return the local steps of an interval with ``workers`` that has ``steps`` with as many as
    ``expected``, so that a worker's interval has about the same number of samples."""
    return max(1, round(steps * min(1.0, workers / max(expected, 1))))


def balanced_steps(facts: RoundFacts) -> int | None:
    """Return the power of two of local steps that take about as long as an exchange.

    All workers of a round get the same number. None if the round's workers don't know the times.
    """
    if not facts.exchange_seconds or not facts.step_seconds:
        return None
    ratio = facts.exchange_seconds / facts.step_seconds
    return int(2 ** round(math.log2(min(max(ratio, 1.0), MAX_STEPS))))


def takes_turns(facts: RoundFacts, before: bool) -> bool:
    """Return True if the workers of a round train on during exchanges, with copies of their own.

    ``before``: they do so already, so that noise changes nothing.
    """
    step, exchange = facts.step_seconds, facts.exchange_seconds
    if not step or exchange < SLOW_EXCHANGE:
        return before and not exchange
    return exchange >= (TURNS_UNTIL if before else TURNS_FROM) * step


def is_late(round_: RoundFacts, planned: float, done: int, seconds: float) -> bool:
    """Return True if an interval should end, because the others of its round have ended theirs.

    It has made ``done`` of ``planned`` local steps in ``seconds``, which is at least
    :data:`MUCH_SLOWER` times as long as the round's members plan for each. Always False if the
    round has no other member, or its speed is unknown.
    """
    step = round_.step_seconds
    if round_.workers <= 1 or not step:
        return False
    return seconds >= planned * step and seconds >= MUCH_SLOWER * done * step
