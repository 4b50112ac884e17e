"""Where the subtasks of an epoch stand, as the ledger knows it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.leases import WorkKind
from vcasgd.store.ledger.untrusted import as_count

#: one letter each; where several hold, the first of them
LEASED_AGAIN, LEASED, APPLIED, PARTLY, OPEN = "rlapo"


@dataclass(frozen=True)
class Standing:
    """Of one job. Subtasks below ``settled`` are applied."""

    settled: int
    applied: frozenset[int] = frozenset()
    partly: frozenset[int] = frozenset()
    leased: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()

    def letters(self, first: int, count: int) -> str:
        """One for each subtask from ``first`` on."""
        return "".join(self._letter(each) for each in range(first, first + count))

    def _letter(self, subtask: int) -> str:
        if subtask < self.settled or subtask in self.applied:
            return APPLIED
        if subtask in self.leased:
            return LEASED_AGAIN if subtask in self.again else LEASED
        return PARTLY if subtask in self.partly else OPEN


def standing(ledger: RedisClient, job: str, per_epoch: int) -> Standing:
    """In one look. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
    keys = LedgerKeys(job)
    with ledger.pipeline(transaction=True) as pipe:
        pipe.hget(keys.work, "finished")
        pipe.smembers(keys.done)
        pipe.hkeys(keys.holders)
        pipe.hkeys(keys.counters)
        pipe.hget(keys.shards, "0:totals")
        pipe.smembers(keys.applied)
        finished, done, held, counters, totals, parts = pipe.execute()
    applied = frozenset(map(int, done))
    # of several shards: applied in one and not in all
    somewhere = (as_count(each.partition(b":")[2]) for each in parts)
    told: Mapping[str, list[int]] = json.loads(totals or b"{}")
    return Standing(
        settled=as_count(finished) * per_epoch,
        applied=applied,
        partly=frozenset(told.get("partly", ())) | (frozenset(somewhere) - applied),
        leased=frozenset(_numbers(held, WorkKind.TRAIN)),
        again=frozenset(_numbers(counters, "again")),
    )


def _numbers(names: Iterable[bytes], kind: str) -> Iterable[int]:
    """Of names such as ``train:3``; workers wrote them."""
    for name in names:
        before, _, number = name.decode(errors="replace").partition(":")
        if before == kind and number.isascii() and number.isdigit():
            yield int(number[:19])
