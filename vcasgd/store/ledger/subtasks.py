"""States of a job's subtasks, as recorded in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from vcasgd.learning.applied_record import BLOCK, mask_of
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


#: States of a group of subtasks, the first one that a subtask has; then it is applied.
_OF_GROUP = (
    SubtaskState.LEASED_AGAIN,
    SubtaskState.LEASED,
    SubtaskState.PARTLY_APPLIED,
    SubtaskState.OPEN,
    SubtaskState.APPLIED,
)


@dataclass(frozen=True)
class SubtaskStates:
    """Letters of consecutive subtasks, their :class:`SubtaskState` as ASCII, uint8 [n]."""

    letters: NDArray[np.uint8]

    def counts(self) -> dict[str, int]:
        return {each.value: int((self.letters == ord(each)).sum()) for each in SubtaskState}

    def text(self, per_letter: int = 1) -> str:
        """Return a letter for each ``per_letter`` subtasks.

        It is that of a leased one among them, or else of one that is partly applied. A group of
        which only some are applied is partly applied.
        """
        starts = np.arange(0, len(self.letters), per_letter)
        if per_letter == 1 or not len(starts):
            return self.letters.tobytes().decode()
        has = {
            each: np.logical_or.reduceat(self.letters == ord(each), starts) for each in _OF_GROUP
        }
        has[SubtaskState.PARTLY_APPLIED] |= has[SubtaskState.APPLIED] & has[SubtaskState.OPEN]
        letters = np.array([ord(each) for each in _OF_GROUP], np.uint8)
        first = np.argmax(np.stack([has[each] for each in _OF_GROUP]), axis=0)
        chosen: bytes = letters[first].tobytes()
        return chosen.decode()


def read_subtasks(
    ledger: RedisClient, job: str, per_epoch: int, first: int, count: int, *, shards: int = 1
) -> SubtaskStates:
    """Read the states of ``count`` subtasks from ``first``, all in one epoch, in one transaction.

    Raises :class:`~vcasgd.errors.StoreUnavailable`.
    """
    keys = LedgerKeys(job)
    numbers = range(first // BLOCK, -(-(first + count) // BLOCK)) if count else range(0)
    with ledger.pipeline(transaction=True) as pipe:
        pipe.hmget(keys.shards, "0:totals", *(f"{shard}:finished" for shard in range(shards)))
        pipe.hkeys(keys.holders)
        pipe.hkeys(keys.counters)
        for shard in range(shards):
            pipe.hmget(keys.blocks, "-", *(f"{shard}:{number}" for number in numbers))
        (totals, *finished), held, counters, *stored = pipe.execute()
    settled = [as_count(each) > first // per_epoch if per_epoch else False for each in finished]
    masks = [
        np.ones(count, bool) if whole else _mask(blocks[1:], first - numbers.start * BLOCK, count)
        for whole, blocks in zip(settled, stored, strict=True)
    ]
    applied = reduce(np.logical_and, masks)
    partly = json.loads(totals or b"{}").get("partly", ())
    leased = _chosen(_numbers(held, WorkKind.TRAIN), first, count)
    again = leased & _chosen(_numbers(counters, "again"), first, count)
    letters = np.full(count, ord(SubtaskState.OPEN), np.uint8)
    # With several shards, a subtask can be applied in some of them.
    letters[reduce(np.logical_or, masks) | _chosen(partly, first, count)] = ord(
        SubtaskState.PARTLY_APPLIED
    )
    letters[leased] = ord(SubtaskState.LEASED)
    letters[again] = ord(SubtaskState.LEASED_AGAIN)
    letters[applied] = ord(SubtaskState.APPLIED)
    return SubtaskStates(letters)


def _mask(blocks: Sequence[bytes | None], skip: int, count: int) -> NDArray[np.bool_]:
    parts = [mask_of(bits or b"") for bits in blocks]
    whole = np.concatenate(parts) if parts else np.empty(0, bool)
    return whole[skip : skip + count]


def _chosen(subtasks: Iterable[int], first: int, count: int) -> NDArray[np.bool_]:
    chosen = np.zeros(count, bool)
    chosen[[each - first for each in subtasks if first <= each < first + count]] = True
    return chosen


def _numbers(names: Iterable[bytes], kind: str) -> Iterable[int]:
    """Yield the numbers of names such as ``train:3``. Workers write them, so skip invalid ones."""
    for name in names:
        before, _, number = name.decode(errors="replace").partition(":")
        if before == kind and number.isascii() and number.isdigit():
            yield int(number[:19])
