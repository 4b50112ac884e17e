"""What was found by measuring a job while it trains: the controller writes it, workers, parameter
servers and people read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys


@dataclass(frozen=True)
class Tuned:
    """As long as nothing was found, all is as the job says.

    ``shares``: of the push interval, by worker. ``implicit_momentum``: that asynchrony adds.
    ``mixing``: by what the weight of updates is multiplied. ``learners``: by machine.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    implicit_momentum: float = 0.0
    mixing: float = 1.0
    learners: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[bytes, bytes]) -> Tuned:
        """From the hash in the ledger. Raises :class:`ValueError`."""
        names = {each.name for each in fields(cls)}
        found = {name.decode(): json.loads(text) for name, text in row.items()}
        return cls(**{name: value for name, value in found.items() if name in names})


class Tunings:
    """Of one job."""

    def __init__(self, ledger: RedisClient, job: str) -> None:
        self._ledger = ledger
        self._key = LedgerKeys(job).tuning

    def read(self) -> Tuned:
        return Tuned.of(self._ledger.hgetall(self._key))

    def tell(self, **found: Any) -> None:
        """Some fields of :class:`Tuned`; the others stay."""
        self._ledger.hset(
            self._key, mapping={name: json.dumps(value) for name, value in found.items()}
        )
