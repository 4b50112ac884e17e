"""Values that the controller tunes from measurements.

The controller writes them; workers, parameter servers, and the API read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from vcasgd.learning.divergence import learning_rate_factor
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.placement import Suspect, read_suspects


@dataclass(frozen=True)
class Tuned:
    """Tuned values of a job. The defaults change nothing.

    ``shares``: worker → share of the push interval. ``implicit_momentum``: momentum that
    asynchrony adds. ``mixing``: factor of the weight of updates. ``learners``: machine → number
    of learners. ``rollbacks``: how often training went back to an earlier model, at last to that of
    the checkpoint ``rollback_to``, because it diverged or, with ``restores``, because the work of
    an owner was wrong. ``restorations`` counts the latter, for the owners in ``undone``.
    ``suspects`` are the owners that parameter servers accuse, by name.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    implicit_momentum: float = 0.0
    mixing: float = 1.0
    learners: Mapping[str, int] = field(default_factory=dict)
    rollbacks: int = 0
    rollback_to: str = ""
    restores: bool = False
    restorations: int = 0
    undone: Sequence[str] = ()
    suspects: Mapping[str, Suspect] = field(default_factory=dict)

    @property
    def learning_rate(self) -> float:
        """Factor of the learning rate after the rollbacks, in (0, 1]."""
        return learning_rate_factor(self.divergences)

    @property
    def divergences(self) -> int:
        """Rollbacks because training diverged."""
        return self.rollbacks - self.restorations

    @classmethod
    def of(cls, row: Mapping[bytes, bytes]) -> Tuned:
        """Parse the hash in the ledger. Raises :class:`ValueError`."""
        names = {each.name for each in fields(cls)}
        values = {name.decode(): json.loads(text) for name, text in row.items()}
        known = {name: value for name, value in values.items() if name in names}
        return cls(**known, suspects=read_suspects(row))


class Tunings:
    """Access to the tuned values of one job. Raises :class:`~vcasgd.errors.StoreUnavailable`."""

    def __init__(self, ledger: RedisClient, job: str) -> None:
        self._ledger = ledger
        self._key = LedgerKeys(job).tuning

    def read(self) -> Tuned:
        """Return the current values."""
        return Tuned.of(self._ledger.hgetall(self._key))

    def publish(self, **values: Any) -> None:
        """Set some fields of :class:`Tuned`; the others stay."""
        self._ledger.hset(
            self._key, mapping={name: json.dumps(value) for name, value in values.items()}
        )
