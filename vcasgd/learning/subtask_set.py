"""Sets of subtasks as bitmaps, so that a million subtasks are read and stored in small pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

#: Subtasks in a block of a bitmap; the same as in ``store/scripts/blocks.lua``.
BLOCK = 4096
#: Largest size of a block in bytes.
BLOCK_BYTES = BLOCK // 8
#: Exceeds the number of any block; the numbers of subtasks fit into 64 bits.
MAX_BLOCKS = 2**50


class SubtaskSet:
    """A set of subtasks.

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
        """Add a subtask."""
        bits = self._blocks.setdefault(subtask // BLOCK, bytearray())
        byte, bit = divmod(subtask % BLOCK, 8)
        bits.extend(bytes(max(0, byte + 1 - len(bits))))
        bits[byte] |= 1 << bit

    def remove_below(self, subtask: int) -> None:
        """Remove all smaller subtasks."""
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
