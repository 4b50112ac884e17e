"""Workers that are known to be lost: their leases are free at once, and no round waits for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vcasgd.logging import isolated
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.replies import mapped_errors

#: Lost workers in one call of the script, and losses of a job that are kept.
MAX_REPORTED, MAX_KEPT = 500, 2000


class LostWorkers:
    """Reports losses, and reads those that others reported; for one thread.

    Methods raise :class:`~vcasgd.errors.StoreUnavailable`.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._lose = ledger.script("ledger/lose")
        #: Number of the last loss that was read, by job.
        self._read: dict[str, float] = {}

    def report(self, workers: Mapping[str, Collection[str]]) -> int:
        """Free the leases of each job's lost workers; return how many there were. Idempotent.

        A worker that is alive after all loses them, trains on with others, and loses no update
        that it has pushed.
        """
        calls = [
            (job, names[at : at + MAX_REPORTED])
            for job, names in ((job, sorted(names)) for job, names in workers.items())
            for at in range(0, len(names), MAX_REPORTED)
        ]
        with self._ledger.pipeline() as pipe:
            for job, names in calls:
                keys = LedgerKeys(job)
                self._lose(
                    keys=[keys.record, keys.leases, keys.holders, keys.open, keys.lost],
                    args=[MAX_KEPT, *names],
                    client=pipe,
                )
            answers = pipe.execute(raise_on_error=False)
        freed = 0
        for (job, _), answer in zip(calls, answers, strict=True):
            # What the workers of one job wrote must not keep the leases of another one.
            with isolated(job), mapped_errors():
                if isinstance(answer, Exception):
                    raise answer
                freed += answer
        return freed

    def news(self, jobs: Collection[str]) -> dict[str, frozenset[str]]:
        """Return the workers that were lost since the last call, by job, in one round trip.

        The first call for a job returns all that are kept, so a worker can be back since then.
        """
        self._read = {job: self._read.get(job, 0.0) for job in jobs}
        with self._ledger.pipeline() as pipe:
            for job, last in self._read.items():
                pipe.zrange(LedgerKeys(job).lost, f"({last}", "inf", byscore=True, withscores=True)
            answers = pipe.execute()
        news = {}
        for job, rows in zip(self._read, answers, strict=True):
            if rows:
                self._read[job] = max(score for _, score in rows)
                news[job] = frozenset(name.decode() for name, _ in rows if name)
        return news
