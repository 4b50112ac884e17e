"""What each machine did for a job, and when: lanes of a timeline, in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys


class Machines:
    """Lanes of all jobs. A lane is plain data, as :mod:`vcasgd.controller.fleet.machine_timeline`
    makes it."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def of(self, job: str) -> dict[str, dict[str, Any]]:
        """By instance."""
        found = self._ledger.hgetall(LedgerKeys(job).machines)
        return {instance.decode(): json.loads(lane) for instance, lane in found.items()}

    def keep(self, job: str, lanes: Mapping[str, Mapping[str, Any]], gone: Iterable[str]) -> None:
        """Writes some lanes anew, and forgets others."""
        key, forgotten = LedgerKeys(job).machines, list(gone)
        with self._ledger.pipeline(transaction=True) as pipe:
            if lanes:
                pipe.hset(key, mapping={name: json.dumps(lane) for name, lane in lanes.items()})
            if forgotten:
                pipe.hdel(key, *forgotten)
            pipe.execute()
