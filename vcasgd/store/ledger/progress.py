"""What the parameter servers of a job told the ledger, shard by shard, and the job's sum of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ShardProgress:
    """``version`` is that of the first shard; ``totals`` see :func:`_combined`."""

    version: int = 0
    totals: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Mapping[bytes, bytes], shards: int) -> ShardProgress:
        """From the ledger's hash; see :attr:`~vcasgd.store.keys.LedgerKeys.shards`."""
        totals = [json.loads(told.get(b"%d:totals" % shard, b"{}")) for shard in range(shards)]
        return cls(int(told.get(b"0:version", 0)), _combined(totals))


def _combined(totals: list[dict[str, Any]]) -> dict[str, Any]:
    """An update has a part in each shard: counts and means are those of the first one.

    ``applied`` is what is in all shards, ``repeated`` what is worst in any; refused parts are
    summed, because each is a fault of its own.
    """
    first = totals[0]
    if len(totals) == 1 or not first:
        return first
    rejected: Counter[str] = Counter()
    for each in totals:
        rejected.update(each.get("rejected", {}))
    return {
        **first,
        "applied": min(each.get("applied", 0) for each in totals),
        "repeated": max((each.get("repeated", 0) for each in totals), key=abs),
        "rejected": dict(rejected),
    }
