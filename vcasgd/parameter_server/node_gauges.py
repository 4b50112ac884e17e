"""What a parameter server tells of its store node: memory, load, what waits, what it publishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from vcasgd.errors import StoreError
from vcasgd.store.connection import RedisClient
from vcasgd.store.gauges import read_gauges

#: a rate over less says little
RATE_SECONDS = 1.0


class Served(Protocol):
    """A shard, as far as it is counted here."""

    job: str
    publications: int

    @property
    def stream(self) -> str: ...


class NodeGauges:
    """Of one tensors server and the parameter server beside it."""

    def __init__(self, tensors: RedisClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._tensors = tensors
        self._clock = clock
        self._since = clock()
        self._counted: dict[str, int] = {}
        self._rate = 0.0

    def read(self, shards: Sequence[Served]) -> dict[str, Any]:
        """Plain data; without what the tensors server does not tell now."""
        rate = {"publications_per_second": self._publications(shards)}
        try:
            found = asdict(read_gauges(self._tensors, [shard.stream for shard in shards]))
        except StoreError:
            # away, or not ours to ask: the parameter server is alive all the same, and says so
            return rate
        waiting = dict(zip((shard.job for shard in shards), found.pop("lengths"), strict=True))
        return {**found, **rate, "queued": waiting}

    def _publications(self, shards: Sequence[Served]) -> float:
        seconds = self._clock() - self._since
        if seconds >= RATE_SECONDS:
            now = {shard.job: shard.publications for shard in shards}
            made = sum(count - self._counted.get(job, 0) for job, count in now.items())
            self._rate = made / seconds
            self._since, self._counted = self._clock(), now
        return self._rate
