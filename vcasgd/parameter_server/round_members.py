"""Workers of a job's rounds: when a round ends, and the batch that all of them share.

Pure: times are seconds of any clock, which the caller passes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median_high

from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import RoundFacts

#: Least seconds for which a round waits for a worker after its first update. A worker that is
#: this late was interrupted, not slow.
MIN_GRACE = 0.25
#: Intervals for which it waits. After an update that just missed the last round, the others arrive
#: an interval later. Without a reserve, each half of the workers would miss the other's rounds.
GRACE_INTERVALS = 1.25
#: Most seconds, so that one lost machine never holds up the others for long.
MAX_GRACE = 30.0
#: Rounds that a worker can miss in a row and still count. A late one is in the next round again,
#: and in the meantime, the others must not take over its part of the batch.
MAX_MISSED = 2
#: Factor by which a member's batch can exceed what its samples show. The last interval of a
#: subtask is short if the batch has just grown.
MAX_LARGER = 8.0
#: Factor by which a member can be faster than the others. One that is faster still gets its part
#: of the batch in several steps.
MAX_FASTER = 16.0


class RoundMembers:
    """Members of the present round and of the last ones, each with its last update.

    Workers that pushed in the last round are expected in the present one. A round waits for them
    somewhat longer than its slowest worker so far took to train its update, from the first update
    on: a worker on time arrives before that, and a lost one costs little more than one interval, or
    less if its loss becomes known. It isn't expected again until it pushes.

    ``in_turn``: workers push the shards of a store node in turn, and train on meanwhile. Then one
    that missed a round is expected in the next one, too: otherwise, each half of the workers would
    wait at another shard.
    """

    def __init__(self, *, in_turn: bool = False) -> None:
        self._most_missed = MAX_MISSED - 1 if in_turn else 0
        #: Workers of the present round.
        self.present: dict[str, Header] = {}
        #: Workers of the last rounds, and how many of these each has missed since its update.
        self._recent: dict[str, tuple[Header, int]] = {}
        self._began = 0.0
        self._grace = MIN_GRACE

    def arrive(self, header: Header, now: float) -> None:
        """Record a worker's update."""
        if not self.present:
            self._began, self._grace = now, MIN_GRACE
        self.present[header.worker] = header
        interval = GRACE_INTERVALS * header.interval_seconds
        self._grace = min(max(self._grace, interval), MAX_GRACE)

    @property
    def deadline(self) -> float | None:
        """When the round ends at the latest; None before its first update."""
        return self._began + self._grace if self.present else None

    def waiting_seconds(self, now: float) -> float:
        """Return for how long the round has waited for missing workers."""
        return 0.0 if self.complete(now) else now - self._began

    def complete(self, now: float) -> bool:
        """Return True if nobody is missing, or the missing ones are too late."""
        deadline = self.deadline
        if deadline is None or now >= deadline:
            return True
        expected = {
            worker for worker, (_, missed) in self._recent.items() if missed <= self._most_missed
        }
        return bool(expected) and expected <= self.present.keys()

    def lose(self, workers: Collection[str]) -> None:
        """Forget workers that are known to be lost. One that pushes is expected again."""
        for worker in workers:
            self._recent.pop(worker, None)

    def end(self) -> None:
        """Start the next round, which expects those that arrived in this one."""
        if not self.present:
            return
        missing = {
            worker: (header, missed + 1)
            for worker, (header, missed) in self._recent.items()
            if missed + 1 < MAX_MISSED
        }
        self._recent = missing | {worker: (header, 0) for worker, header in self.present.items()}
        self.present = {}

    def facts(self) -> RoundFacts:
        """Return the facts of the present round.

        Recent members that are missing count with their last update. No round without updates has
        facts. ``step_seconds`` is how long a step of all batches would last if each member had the
        part of it that its speed allows: with the plain mean of the durations, one slow member
        would make all fast ones take too many samples.

        What members claim counts only within :data:`MAX_LARGER` and :data:`MAX_FASTER`.
        Otherwise, one that lies could leave hardly a sample to the others.
        """
        headers = self._all()
        batches = _credible_batches(headers)
        durations = {
            worker: header.step_seconds
            for worker, header in headers.items()
            if header.step_seconds and header.batch
        }
        shortest = median_high(durations.values()) / MAX_FASTER if durations else 0.0
        timed = sum(batches[worker] for worker in durations)
        # Zero if a member claims next to nothing as its batch.
        speed = sum(batches[worker] / max(each, shortest) for worker, each in durations.items())
        exchanges = [each.exchange_seconds for each in headers.values() if each.exchange_seconds]
        return RoundFacts(
            workers=len(headers),
            batch=sum(batches.values()),
            step_seconds=timed / speed if speed else 0.0,
            exchange_seconds=min(exchanges, default=0.0),
        )

    def share(self) -> float:
        """Return the part of all members' batches that the present updates have, in (0, 1].

        Without the missing ones, their mean is as far from the model as a step of the whole batch,
        but has fewer samples.
        """
        batches = _credible_batches(self._all())
        whole = sum(batches.values())
        return sum(batches[worker] for worker in self.present) / whole if whole else 1.0

    def _all(self) -> dict[str, Header]:
        recent = {worker: header for worker, (header, _) in self._recent.items()}
        return recent | self.present if self.present else {}


def _credible_batches(headers: Mapping[str, Header]) -> dict[str, float]:
    """Return the local batch of each member in samples; all members make about as many steps.

    It is the mean of the steps that the member made, because an interval needn't be a multiple of
    the batch that it meant to use. So members make up for larger ones with their next batches. A
    worker that is alone makes the job's batches; only the last one of an epoch may be smaller.
    """
    if len(headers) == 1:
        return {worker: header.batch for worker, header in headers.items()}
    samples = {worker: header.stop - header.start for worker, header in headers.items()}
    steps = [samples[worker] / each.batch for worker, each in headers.items() if each.batch]
    most = MAX_LARGER / median_high(steps) if steps else 0.0
    made = {worker: _mean_batch(samples[worker], each.batch) for worker, each in headers.items()}
    return {worker: min(made[worker], most * samples[worker]) for worker in headers}


def _mean_batch(samples: int, batch: float) -> float:
    """Return the mean batch of an interval of so many samples that is cut into equal ones."""
    # No step has less than a sample.
    return samples / max(1, round(min(samples / batch, samples))) if batch else 0.0
