"""Quota of what each job's workers keep in a tensors server.

They write payloads, moments, and the first snapshot under names that they choose, so only a look at
all keys finds what a hostile one has written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection

from vcasgd.limits import MAX_SHARE_BESIDE_OTHERS
from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.snapshot_index import SCANNED

#: Calls that measure keys at a time: some milliseconds of a server.
SCANS = 10
#: Seconds for which a job may keep what it wrote while it was alone: updates in transit are
#: processed meanwhile, and slots of silent workers released.
GRACE_SECONDS = 60.0


class MemoryQuota:
    """Quota of each job beside others, if the server has a memory limit."""

    def __init__(self, tensors: RedisClient) -> None:
        self._tensors = tensors
        self._measure = tensors.script("tensors/measure")
        self._cursor = b"0"
        self._used: Counter[bytes] = Counter()
        self._alone_at = float("-inf")

    def excess(self, jobs: Collection[str], without_model: Collection[str]) -> dict[str, str]:
        """Measure the next keys; return why jobs have to end, if all keys are measured now.

        ``jobs`` are all active ones. Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        if len(jobs) == 1:
            self._alone_at = time.monotonic()
        for _ in range(SCANS):
            self._cursor, *found = self._measure(args=[self._cursor, SCANNED])
            self._used.update(dict(zip(found[::2], found[1::2], strict=True)))
            if self._cursor == b"0":
                return self._excess(jobs, without_model)
        return {}

    def _excess(self, jobs: Collection[str], without_model: Collection[str]) -> dict[str, str]:
        used, self._used = self._used, Counter()
        limit = int(self._tensors.info("memory")["maxmemory"])
        allowed = int(limit * MAX_SHARE_BESIDE_OTHERS)
        if not limit or time.monotonic() - self._alone_at < GRACE_SECONDS:
            return {}
        written = {job: used[f"u:{job}".encode()] for job in jobs}
        # Once there is a model, only the parameter server writes snapshots.
        for job in without_model:
            written[job] += used[f"s:{job}".encode()]
        return {
            job: f"the job's workers wrote {size >> 20} MiB into the tensors server, at most "
            f"{allowed >> 20} are allowed beside other jobs"
            for job, size in written.items()
            if size > allowed
        }
