"""Limits of the histories of jobs: the oldest events and log lines go, and points are thinned."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vcasgd.logging import isolated
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.metrics import MetricColumns
from vcasgd.store.ledger.thinning import thinned_indices

log = logging.getLogger(__name__)

#: Seconds after the end of a job from which on it keeps less.
ENDED_SECONDS = 3600.0
#: Share of a running job's points that are its newest ones, all of which stay. The older ones are
#: thinned to the same share, so half of the points can come before the next thinning.
SHARE = 0.25
#: Series whose extremes stay.
SPIKY = ("loss", "updates_per_second")
#: How far the last line of a log can be ahead of this machine's clock.
FUTURE_SECONDS = 24 * 3600.0
#: Entries beyond the limit from which on some are dropped, so that not every look drops a few.
SLACK = 200
#: Jobs in one request, and IDs in one call of the script.
JOBS_AT_ONCE, IDS_AT_ONCE = 200, 200


@dataclass(frozen=True)
class HistoryLimits:
    """Number of entries that a job keeps. ``ended_share``: the part of them that stays when it has
    ended."""

    points: int
    events: int
    log_lines: int
    ended_share: float

    def ended(self) -> HistoryLimits:
        """Return the limits of a job that has ended."""
        share = self.ended_share
        return HistoryLimits(
            int(self.points * share), int(self.events * share), int(self.log_lines * share), 1.0
        )


class HistoryKeeper:
    """Keeps histories within their limits. One thread uses it.

    Entries keep their IDs, so a reader continues from any position, even one that is gone. Calls
    raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, ledger: RedisClient, limits: HistoryLimits) -> None:
        self._ledger = ledger
        self._limits = limits
        self._thin = ledger.script("ledger/thin")
        self._reset_log = ledger.script("ledger/reset_log")
        #: Jobs that ended long ago and keep no more than they should.
        self._settled: set[str] = set()

    def enforce(self) -> None:
        """Enforce the limits of all jobs. One that can't be trimmed leaves the others as they are.

        An ended job is looked at until it is settled, and then no more.
        """
        with self._ledger.pipeline() as pipe:
            pipe.zrange(names.JOBS, 0, -1)
            pipe.smembers(names.ACTIVE)
            every, active = pipe.execute()
        jobs, running = [job.decode() for job in every], {job.decode() for job in active}
        self._settled &= set(jobs)
        ended = self._long_ended([j for j in jobs if j not in running and j not in self._settled])
        self._enforce([job for job in jobs if job in running], self._limits, SHARE)
        self._settled |= self._enforce(ended, self._limits.ended(), 0.0)

    def _long_ended(self, jobs: Sequence[str]) -> list[str]:
        found, latest = [], time.time() - ENDED_SECONDS
        for some in _batches(jobs):
            with self._ledger.pipeline() as pipe:
                for job in some:
                    pipe.hget(LedgerKeys(job).record, "ended_at")
                times = pipe.execute()
            for job, at in zip(some, times, strict=True):
                with isolated(job):
                    if at is not None and float(at) <= latest:
                        found.append(job)
        return found

    def _enforce(self, jobs: Sequence[str], limits: HistoryLimits, newest: float) -> set[str]:
        """Enforce limits, and return the jobs that now meet them."""
        done = set()
        for some in _batches(jobs):
            with self._ledger.pipeline() as pipe:
                for job in some:
                    keys = LedgerKeys(job)
                    for key in (keys.events, keys.logs, keys.metrics):
                        pipe.xlen(key)
                lengths = pipe.execute()
            for at, job in enumerate(some):
                with isolated(job):
                    events, lines, points = lengths[3 * at : 3 * at + 3]
                    self._trim(LedgerKeys(job).events, events, limits.events)
                    self._trim(LedgerKeys(job).logs, lines, limits.log_lines)
                    self._reset(job)
                    if points > limits.points and not self.thin(job, limits.points, newest):
                        continue
                    done.add(job)
        return done

    def _trim(self, stream: str, length: int, most: int) -> None:
        if length > most + SLACK:
            self._ledger.xtrim(stream, maxlen=most, approximate=False)

    def _reset(self, job: str) -> None:
        """Delete a log that no line can be added to."""
        latest = int((time.time() + FUTURE_SECONDS) * 1000)
        if self._reset_log(keys=[LedgerKeys(job).logs], args=[latest]):
            log.warning("%s: a worker gave a line an ID in the future; the log was deleted", job)

    def thin(self, job: str, most: int, newest: float) -> bool:
        """Thin the points of a job to at most ``most``.

        ``newest``: the share of ``most`` that the newest points have, and all others together. 0
        leaves no part as it is. Returns False if too many points came meanwhile.
        """
        keys, points = LedgerKeys(job), MetricColumns(self._ledger, job, SPIKY)
        points.refresh()
        recent = int(most * newest)
        old = len(points) - recent
        if old <= 0:
            return True
        series = [points.column(name)[:old] for name in SPIKY]
        chosen = thinned_indices(series, old, recent or most, points.times()[:old])
        kept = points.ids([*chosen, *range(old, len(points))])
        self._ledger.unlink(keys.thinned)
        streams = [keys.metrics, keys.thinned]
        for first in range(0, len(kept), IDS_AT_ONCE):
            self._thin(keys=streams, args=["copy", *kept[first : first + IDS_AT_ONCE]])
        return bool(self._thin(keys=streams, args=["replace", kept[-1]]))


def _batches(jobs: Sequence[str]) -> Iterable[Sequence[str]]:
    return (jobs[first : first + JOBS_AT_ONCE] for first in range(0, len(jobs), JOBS_AT_ONCE))
