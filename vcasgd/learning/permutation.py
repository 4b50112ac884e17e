"""Seeded permutations in constant memory.

Up to :data:`SHUFFLED` numbers are shuffled. A larger permutation is computed where it is needed: a
Feistel network permutes the numbers of the next power of two, and a result outside the range is
permuted again until it is inside (Black and Rogaway, *Ciphers with Arbitrary Finite Domains*).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

#: Most numbers that are shuffled: 512 KiB.
SHUFFLED = 1 << 16
#: Shuffled permutations kept in memory: of the current epoch, the next one, and two more for
#: simulations of several jobs.
CACHED = 4
#: Positions that are computed at once. A call of NumPy takes longer than its work on a batch.
CHUNK = 4096
#: Rounds of the network. Four make it indistinguishable from chance if the round function is random
#: (Luby and Rackoff); two more, because it isn't.
ROUNDS = 6


def permuted(seed: tuple[int, ...], size: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return positions ``[start, stop)`` of a permutation of ``[0, size)``, read-only.

    It is the same in all releases of NumPy, because machines of a fleet can have different ones.
    """
    if size <= SHUFFLED:
        return shuffled(seed, size)[start:stop]
    first = start // CHUNK
    parts = [
        _chunk(seed, size, number) for number in range(first, max(first + 1, -(-stop // CHUNK)))
    ]
    order = parts[0] if len(parts) == 1 else np.concatenate(parts)
    order.setflags(write=False)
    return order[start - first * CHUNK : stop - first * CHUNK]


@lru_cache(maxsize=CACHED)
def _chunk(seed: tuple[int, ...], size: int, number: int) -> NDArray[np.int64]:
    """Return :data:`CHUNK` positions of a computed permutation, or fewer at its end."""
    start = number * CHUNK
    numbers = np.arange(start, min(start + CHUNK, size), dtype=np.uint64)
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    bits = (size - 1).bit_length()
    numbers = _feistel(numbers, keys, bits)
    while len(outside := np.flatnonzero(numbers >= size)):
        # On average, less than half of them are outside.
        numbers[outside] = _feistel(numbers[outside], keys, bits)
    return numbers.astype(np.int64)


@lru_cache(maxsize=CACHED)
def shuffled(seed: tuple[int, ...], size: int) -> NDArray[np.int64]:
    """Return a permutation of ``[0, size)`` that takes 8 bytes for each number, read-only."""
    # RandomState, not Generator: only its stream is guaranteed to stay the same.
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    order = generator.permutation(size).astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def _feistel(
    numbers: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int
) -> NDArray[np.uint64]:
    """Permute the numbers of ``bits``; each round changes one half by a function of the other."""
    low = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << -(-bits // 2)) - 1)
    left, right = numbers >> low, numbers & low_mask
    for first, second in keys.reshape(-1, 2):
        left = left ^ (_mixed(right, first) & high_mask)
        right = right ^ (_mixed(left, second) & low_mask)
    return (left << low) | right


def _mixed(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Mix all bits with a key, as SplitMix64 does (Steele, Lea, and Flood, 2014)."""
    mixed = numbers + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
