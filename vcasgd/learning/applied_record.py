"""The record of the samples in a snapshot; it makes every sample count exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from vcasgd.errors import CheckpointDamaged, InvalidUpdate
from vcasgd.learning.subtasks import EpochPlan

#: Subtasks in a block of a bitmap; the same as in ``store/scripts/blocks.lua``.
BLOCK = 4096
#: Largest size of a block in bytes.
BLOCK_BYTES = BLOCK // 8
#: Exceeds the number of any block; the numbers of subtasks fit into 64 bits.
MAX_BLOCKS = 2**50


class SubtaskSet:
    """A set of subtasks as a bitmap, of which small pieces are read and stored.

    Bit ``i % 8`` (0 is the lowest) of byte ``i // 8`` of block ``b`` is subtask ``b·BLOCK + i``.
    Zeros at the end of a block and empty blocks are left out, so equal sets have equal blocks.
    Raises :class:`ValueError` if a block is too large, or its number out of range.
    """

    def __init__(self, blocks: Mapping[int, bytes] | None = None) -> None:
        self._blocks: dict[int, bytearray] = {}
        for number, bits in (blocks or {}).items():
            if not 0 <= number < MAX_BLOCKS or len(bits) > BLOCK_BYTES:
                raise ValueError(f"block {number} of {len(bits)} bytes is not a block of a bitmap")
            if kept := bytearray(bits.rstrip(b"\0")):
                self._blocks[number] = kept

    @property
    def blocks(self) -> dict[int, bytes]:
        """A copy of the blocks that are not empty."""
        return {number: bytes(bits) for number, bits in self._blocks.items()}

    def __contains__(self, subtask: int) -> bool:
        bits = self._blocks.get(subtask // BLOCK, b"")
        byte, bit = divmod(subtask % BLOCK, 8)
        return byte < len(bits) and bool(bits[byte] >> bit & 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers().tolist())

    def numbers(self) -> NDArray[np.int64]:
        """Return the subtasks in ascending order, int64 [n]."""
        parts = [_members(self._blocks[each]) + each * BLOCK for each in sorted(self._blocks)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def add(self, subtask: int) -> None:
        bits = self._blocks.setdefault(subtask // BLOCK, bytearray())
        byte, bit = divmod(subtask % BLOCK, 8)
        bits.extend(bytes(max(0, byte + 1 - len(bits))))
        bits[byte] |= 1 << bit

    def remove_below(self, subtask: int) -> None:
        block = subtask // BLOCK
        for each in [each for each in self._blocks if each < block]:
            del self._blocks[each]
        if block in self._blocks:
            members = _members(self._blocks.pop(block)) + block * BLOCK
            for each in members[members >= subtask].tolist():
                self.add(each)


def mask_of(bits: bytes) -> NDArray[np.bool_]:
    """Return which subtasks of a block are in the set, bool [BLOCK]."""
    padded = np.frombuffer(bits[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0"), np.uint8)
    return np.unpackbits(padded, bitorder="little").astype(bool)


def _members(bits: bytes | bytearray) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))


class AppliedRecord:
    """The applied samples of a job, as one position per subtask.

    The samples of a subtask are applied in order, so a position is enough. When all subtasks of an
    epoch are done and all earlier epochs are finished, they are folded into ``finished_epochs``,
    so the record covers only the current epochs. Of these, it has one bit for a subtask that is
    done, and a position for one that is partly applied. No method's cost grows with the number of
    subtasks, except for the creation and the end of an epoch.

    ``positions`` may contain done subtasks, as in records of version 0.1.0, and those of finished
    epochs, which don't count. Raises :class:`CheckpointDamaged` if this is not a record of the
    plan.
    """

    def __init__(
        self,
        plan: EpochPlan,
        finished_epochs: int = 0,
        positions: Mapping[int, int] | None = None,
        done: Mapping[int, bytes] | None = None,
    ) -> None:
        self.plan = plan
        if not 0 <= finished_epochs <= plan.epochs:
            raise _damaged(f"{finished_epochs} finished epochs of {plan.epochs}")
        #: Epochs ``[0, finished_epochs)`` are completely applied.
        self.finished_epochs = finished_epochs
        #: Partly applied subtask of an unfinished epoch → number of its applied samples.
        self.positions: dict[int, int] = {}
        #: Completely applied subtasks of unfinished epochs.
        self.done = _bitmap(done)
        self.done.remove_below(self.first_open)
        self._take(positions or {})
        numbers = self.done.numbers()
        if len(numbers) and numbers[-1] >= plan.total_subtasks:
            raise _damaged(f"there is no subtask {numbers[-1]}")
        finished = min(finished_epochs * plan.samples, plan.total_samples)
        partly = sum(self.positions.values())
        #: Number of applied samples over all epochs.
        self.samples_applied = finished + partly + int(plan.sizes(numbers).sum())
        epochs, counts = np.unique(numbers // plan.subtasks_per_epoch, return_counts=True)
        self._done_in = Counter(dict(zip(epochs.tolist(), counts.tolist(), strict=True)))
        self._fold()

    def _take(self, positions: Mapping[int, int]) -> None:
        for subtask, stop in positions.items():
            if not (
                0 <= subtask < self.plan.total_subtasks and 0 <= stop <= self.plan.size(subtask)
            ):
                raise _damaged(f"subtask {subtask} has no position {stop}")
            if subtask < self.first_open or not stop or subtask in self.done:
                continue
            if stop == self.plan.size(subtask):
                self.done.add(subtask)
            else:
                self.positions[subtask] = stop

    @property
    def first_open(self) -> int:
        """The first subtask of the first unfinished epoch."""
        return self.finished_epochs * self.plan.subtasks_per_epoch

    @property
    def complete(self) -> bool:
        """True if every sample of the job is applied."""
        return self.finished_epochs == self.plan.epochs

    def position(self, subtask: int) -> int:
        """Return the applied samples of a subtask. Raises as :meth:`EpochPlan.bounds`."""
        size = self.plan.size(subtask)
        done = subtask < self.first_open or subtask in self.done
        return size if done else self.positions.get(subtask, 0)

    def is_done(self, subtask: int) -> bool:
        """Return True if a subtask is completely applied. Raises as :meth:`EpochPlan.bounds`."""
        return self.position(subtask) == self.plan.size(subtask)

    def check(self, subtask: int, start: int, stop: int) -> None:
        """Check that the samples ``[start, stop)`` of a subtask are the next ones to apply.

        Raises :class:`InvalidUpdate` with the reason ``range`` (no such samples), ``duplicate``
        (already applied), or ``out-of-place`` (earlier samples are missing).
        """
        position, size = self.position(subtask), self.plan.size(subtask)
        samples = f"samples [{start}, {stop}) of subtask {subtask}"
        if not 0 <= start < stop <= size:
            raise InvalidUpdate(f"{samples} do not exist: it has {size}", reason="range")
        if start < position:
            raise InvalidUpdate(f"{samples} are applied up to {position}", reason="duplicate")
        if start > position:
            raise InvalidUpdate(f"{samples} do not start at {position}", reason="out-of-place")

    def advance(self, subtask: int, start: int, stop: int) -> bool:
        """Record the samples ``[start, stop)`` of a subtask as applied.

        Returns True if this finishes an epoch, or several. Raises as :meth:`check`; the record is
        then unchanged.
        """
        self.check(subtask, start, stop)
        self.samples_applied += stop - start
        if stop < self.plan.size(subtask):
            self.positions[subtask] = stop
            return False
        self.positions.pop(subtask, None)
        self.done.add(subtask)
        self._done_in[self.plan.epoch_of(subtask)] += 1
        return self._fold()

    def _fold(self) -> bool:
        before = self.finished_epochs
        while not self.complete:
            if self._done_in[self.finished_epochs] < self.plan.subtasks_in(self.finished_epochs):
                break
            del self._done_in[self.finished_epochs]
            self.finished_epochs += 1
        if self.finished_epochs == before:
            return False
        self.done.remove_below(self.first_open)
        return True


def _bitmap(blocks: Mapping[int, bytes] | None) -> SubtaskSet:
    try:
        return SubtaskSet(blocks)
    except ValueError as error:
        raise _damaged(str(error)) from error


def _damaged(why: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"not an applied record: {why}")
