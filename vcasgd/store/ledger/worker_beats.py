"""Heartbeats of all workers, read incrementally.

A job can have 10,000 workers, and several parts of a process ask for their heartbeats several times
a second. The ledger numbers the heartbeats of a job, so that a reader requests only those after the
last one that it has seen.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
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
        cached = self._job(job)
        with cached.lock:
            self._refresh(LedgerKeys(job), cached)
            return dict(cached.beats)

    def traffic(self, job: str) -> Traffic:
        """Return the bytes that all workers of a job have moved, also those that were removed."""
        cached = self._job(job)
        with cached.lock:
            self._refresh(LedgerKeys(job), cached)
            return Traffic.of_job(cached.removed, cached.beats.values())

    def _job(self, job: str) -> _Job:
        with self._lock:
            cached = self._jobs.setdefault(job, _Job())
            self._jobs.move_to_end(job)
            while len(self._jobs) > JOBS_CACHED:
                self._jobs.popitem(last=False)
            return cached

    def _refresh(self, keys: LedgerKeys, cached: _Job) -> None:
        """Bring a job up to date: the sums of removed workers fit the heartbeats of the others."""
        for _ in range(ATTEMPTS):
            with self._ledger.pipeline(transaction=True) as pipe:
                after = NONE if cached.newest == NONE else f"({cached.newest!r}"
                pipe.zrangebyscore(keys.beats, after, "+inf")
                pipe.zscore(keys.beats, "")
                pipe.hlen(keys.workers)
                pipe.hgetall(keys.traffic)
                changed, newest, count, cached.removed = pipe.execute()
            if (NONE if newest is None else newest) < cached.newest:
                # The ledger was restored to an earlier state.
                cached.newest, cached.names, cached.beats = NONE, set(), {}
                continue
            names = [name for name in changed if name]
            if self._read(keys, cached, names) and len(cached.names) == count:
                usable = newest is not None and abs(newest) < LARGEST_NUMBER
                cached.newest = newest if usable else NONE
                return
            self._compare_names(keys, cached)

    def _read(self, keys: LedgerKeys, cached: _Job, names: list[bytes]) -> bool:
        """Read some heartbeats. Returns False if some of the workers were removed."""
        texts = self._ledger.hmget(keys.workers, names) if names else []
        for name, text in zip(names, texts, strict=True):
            _forget(cached, name)
            if text is not None:
                cached.names.add(name)
                if (readable := worker_name(name)) and (beat := Heartbeat.parse(text)):
                    cached.beats[readable] = beat
        return None not in texts

    def _compare_names(self, keys: LedgerKeys, cached: _Job) -> None:
        present = set(self._ledger.hkeys(keys.workers))
        for name in cached.names - present:
            _forget(cached, name)
        self._read(keys, cached, list(present - cached.names))


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
