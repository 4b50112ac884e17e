"""Heartbeats of all workers, read incrementally.

A job can have 10,000 workers, and several parts of a process ask for their heartbeats several times
a second. The ledger numbers the heartbeats of a job, so that a reader requests only those after the
last one that it has seen.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.heartbeats import Heartbeat, worker_name
from vcasgd.store.ledger.traffic import Traffic

#: Jobs whose heartbeats stay in memory.
JOBS_CACHED = 256
#: Attempts to read while workers are removed meanwhile.
ATTEMPTS = 5
#: Numbers from here on can't be told apart. Only a hostile worker reaches them.
LARGEST_NUMBER = 2.0**53
#: Before all numbers.
NONE = float("-inf")


@dataclass
class _Job:
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: Number of the newest heartbeat that was read.
    newest: float = NONE
    #: All names in the ledger, and the heartbeats of those that can be read.
    names: set[bytes] = field(default_factory=set)
    beats: dict[str, Heartbeat] = field(default_factory=dict)
    removed: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Change:
    """Workers with new heartbeats, the newest number, all workers, and sums of removed ones."""

    names: list[bytes]
    newest: float | None
    count: int
    removed: dict[bytes, bytes]


class WorkerBeats:
    """Cache of the last heartbeat of each worker. Threads may share it.

    Methods raise :class:`~vcasgd.errors.StoreUnavailable`. A heartbeat that a hostile worker
    changes without its number may be returned as it was before.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    def of(self, job: str) -> dict[str, Heartbeat]:
        """Return the heartbeats of a job by worker, without those that can't be read."""
        return self.of_many([job])[job]

    def of_many(self, jobs: Collection[str]) -> dict[str, dict[str, Heartbeat]]:
        """Return the heartbeats of several jobs, in few round trips."""
        with self._locked(jobs) as cached:
            return {job: dict(each.beats) for job, each in cached.items()}

    def traffic(self, job: str) -> Traffic:
        """Return the bytes that all workers of a job have moved, also those that were removed."""
        return self.traffic_of([job])[job]

    def traffic_of(self, jobs: Collection[str]) -> dict[str, Traffic]:
        """Return the traffic of several jobs, in few round trips."""
        with self._locked(jobs) as cached:
            return {
                job: Traffic.of_job(each.removed, each.beats.values())
                for job, each in cached.items()
            }

    @contextmanager
    def _locked(self, jobs: Iterable[str]) -> Iterator[dict[str, _Job]]:
        """Lock jobs, always in the same order, and bring them up to date."""
        with ExitStack() as locks:
            cached = {job: self._job(job) for job in sorted(set(jobs))}
            for each in cached.values():
                locks.enter_context(each.lock)
            self._refresh(cached)
            yield cached

    def _job(self, job: str) -> _Job:
        with self._lock:
            cached = self._jobs.setdefault(job, _Job())
            self._jobs.move_to_end(job)
            while len(self._jobs) > JOBS_CACHED:
                self._jobs.popitem(last=False)
            return cached

    def _refresh(self, jobs: Mapping[str, _Job]) -> None:
        """Bring jobs up to date: the sums of removed workers fit the heartbeats of the others."""
        due = dict(jobs)
        for _ in range(ATTEMPTS):
            if not due:
                return
            changes = self._changes(due)
            texts = self._texts({job: each.names for job, each in changes.items()})
            due = {
                job: due[job]
                for job, change in changes.items()
                if not _apply(due[job], change, texts[job])
            }
            for job, cached in due.items():
                self._compare_names(job, cached)

    def _changes(self, jobs: Mapping[str, _Job]) -> dict[str, _Change]:
        with self._ledger.pipeline(transaction=True) as pipe:
            for job, cached in jobs.items():
                keys = LedgerKeys(job)
                after = NONE if cached.newest == NONE else f"({cached.newest!r}"
                pipe.zrangebyscore(keys.beats, after, "+inf")
                pipe.zscore(keys.beats, "")
                pipe.hlen(keys.workers)
                pipe.hgetall(keys.traffic)
            rows = pipe.execute()
        return {
            job: _Change([name for name in names if name], newest, count, removed)
            for job, names, newest, count, removed in zip(
                jobs, rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True
            )
        }

    def _texts(self, workers: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes | None]]:
        """Return the heartbeats of some workers of each job, in one round trip."""
        asked = [job for job, names in workers.items() if names]
        with self._ledger.pipeline() as pipe:
            for job in asked:
                pipe.hmget(LedgerKeys(job).workers, workers[job])
            texts: dict[str, list[bytes | None]] = dict(zip(asked, pipe.execute(), strict=True))
        return {job: texts.get(job, []) for job in workers}

    def _compare_names(self, job: str, cached: _Job) -> None:
        present = set(self._ledger.hkeys(LedgerKeys(job).workers))
        for name in cached.names - present:
            _forget(cached, name)
        new = list(present - cached.names)
        _store(cached, new, self._texts({job: new})[job])


def _apply(cached: _Job, change: _Change, texts: Sequence[bytes | None]) -> bool:
    """Apply changes to a job. Returns False if workers were removed, too."""
    if (NONE if change.newest is None else change.newest) < cached.newest:
        # The ledger was restored to an earlier state.
        cached.newest, cached.names, cached.beats = NONE, set(), {}
        return False
    cached.removed = change.removed
    _store(cached, change.names, texts)
    if None in texts or len(cached.names) != change.count:
        return False
    usable = change.newest is not None and abs(change.newest) < LARGEST_NUMBER
    cached.newest = change.newest if usable and change.newest is not None else NONE
    return True


def _store(cached: _Job, names: Iterable[bytes], texts: Iterable[bytes | None]) -> None:
    for name, text in zip(names, texts, strict=True):
        _forget(cached, name)
        if text is not None:
            cached.names.add(name)
            if (readable := worker_name(name)) and (beat := Heartbeat.parse(text)):
                cached.beats[readable] = beat


def _forget(cached: _Job, name: bytes) -> None:
    cached.names.discard(name)
    cached.beats.pop(name.decode(errors="replace"), None)


def read_beats(
    ledger: RedisClient, workers: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Heartbeat]:
    """Return the last heartbeats of some workers, given by job and name, in one round trip.

    Workers without one that can be read are missing.
    """
    pairs = list(workers)
    with ledger.pipeline() as pipe:
        for job, worker in pairs:
            pipe.hget(LedgerKeys(job).workers, worker)
        texts = pipe.execute()
    beats = {pair: Heartbeat.parse(text or b"") for pair, text in zip(pairs, texts, strict=True)}
    return {pair: beat for pair, beat in beats.items() if beat is not None}
