"""States of a job's subtasks, as recorded in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import as_count
from vcasgd.store.ledger.leases import WorkKind


class SubtaskState(StrEnum):
    """State of a subtask, with its letter in the REST API. If several apply, the first counts."""

    APPLIED = "a"
    LEASED_AGAIN = "r"
    LEASED = "l"
    PARTLY_APPLIED = "p"
    OPEN = "o"


@dataclass(frozen=True)
class SubtaskStates:
    """Sets of a job's subtasks by state. Subtasks below ``settled`` are applied."""

    settled: int
    applied: frozenset[int] = frozenset()
    partly: frozenset[int] = frozenset()
    leased: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()

    def letters(self, first: int, count: int) -> str:
        """Return the letters of ``count`` subtasks from ``first``."""
        return "".join(self.state(each) for each in range(first, first + count))

    def state(self, subtask: int) -> SubtaskState:
        """Return the state of one subtask."""
        if subtask < self.settled or subtask in self.applied:
            return SubtaskState.APPLIED
        if subtask in self.leased:
            return SubtaskState.LEASED_AGAIN if subtask in self.again else SubtaskState.LEASED
        return SubtaskState.PARTLY_APPLIED if subtask in self.partly else SubtaskState.OPEN


def read_subtasks(ledger: RedisClient, job: str, per_epoch: int) -> SubtaskStates:
    """Read the states of a job's subtasks in one transaction.

    Raises :class:`~vcasgd.errors.StoreUnavailable`.
    """
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
    # with several shards: applied in at least one
    in_a_shard = frozenset(as_count(each.partition(b":")[2]) for each in parts)
    first_shard: Mapping[str, list[int]] = json.loads(totals or b"{}")
    return SubtaskStates(
        settled=as_count(finished) * per_epoch,
        applied=applied,
        partly=frozenset(first_shard.get("partly", ())) | (in_a_shard - applied),
        leased=frozenset(_numbers(held, WorkKind.TRAIN)),
        again=frozenset(_numbers(counters, "again")),
    )


def _numbers(names: Iterable[bytes], kind: str) -> Iterable[int]:
    """Yield the numbers of names such as ``train:3``. Workers write them, so skip invalid ones."""
    for name in names:
        before, _, number = name.decode(errors="replace").partition(":")
        if before == kind and number.isascii() and number.isdigit():
            yield int(number[:19])
