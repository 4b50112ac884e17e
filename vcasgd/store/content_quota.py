"""Quota of what a job's workers write into one key, on the ledger or a tensors server.

Workers write directly, because a server checks the commands of a script against the rules of the
user that runs it. So a hostile one can write any amount, while readers hold a whole key in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from vcasgd.limits import MAX_ENTRIES
from vcasgd.store.connection import RedisClient


class ContentQuota:
    """Quota of some keys of a server: :data:`MAX_ENTRIES`, and for each a number of bytes."""

    def __init__(self, server: RedisClient, max_bytes: Mapping[str, int]) -> None:
        self._server = server
        self._max_bytes = dict(max_bytes)
        self._usage = server.script("usage")

    def enforce(self) -> str | None:
        """Delete keys that exceed their quota, and return why the job has to end; None without.

        Raises :class:`~vcasgd.errors.StoreUnavailable`. Measuring 10,000 entries takes the server
        about a millisecond.
        """
        sizes = self._usage(keys=list(self._max_bytes), args=[MAX_ENTRIES])
        excess = {
            key: _excess(key, entries, used, allowed)
            for (key, allowed), (entries, used) in zip(self._max_bytes.items(), sizes, strict=True)
            if entries > MAX_ENTRIES or used > allowed
        }
        if not excess:
            return None
        self._server.unlink(*excess)
        return next(iter(excess.values()))


def _excess(key: str, entries: int, used: int, allowed: int) -> str:
    written, limit = f"{used >> 20} MiB", str(allowed >> 20)
    if entries > MAX_ENTRIES:
        written, limit = f"{entries} entries", str(MAX_ENTRIES)
    name = key.rpartition(":")[2]
    return f"the job's workers wrote {written} of {name}, at most {limit} are allowed"
