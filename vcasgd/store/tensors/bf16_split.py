"""How a vector lies in the chunks of a snapshot.

Either as float32, or, where workers push bfloat16, as two planes: chunks ``h…`` hold the high
half of each number and chunks ``l…`` the low one (:mod:`vcasgd.learning.halves`). Workers fetch
the high plane, at half the bytes. The low plane is written for what has to be exact: for
checkpoints and evaluations, and from time to time for the parameter server's successor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vcasgd.learning.halves import join, split, widen
from vcasgd.store.bulk import BulkTransfer

#: strings near 1 MiB move fastest: smaller ones cost more calls, larger ones leave the cache
CHUNK_BYTES = 1 << 20


def chunk_count(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def bytes_of(vector: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, nothing copied."""
    return memoryview(vector.numpy().data).cast("B")


def chunks_of(payload: memoryview) -> list[memoryview]:
    """Views of at most :data:`CHUNK_BYTES`, nothing copied."""
    return [payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES)]


def chunk_names(floats: int, *, halves: bool, planes: str = "hl") -> list[str]:
    """Of a whole vector, in the order in which they are written; ``planes``: ``h`` or ``hl``."""
    if not halves:
        return [str(index) for index in range(chunk_count(floats * 4))]
    return [f"{plane}{index}" for index in range(chunk_count(floats * 2)) for plane in planes]


def outgoing(vector: Tensor, *, halves: bool, planes: str = "hl") -> Iterator[memoryview]:
    """The chunks of a vector (float32 ``[n]``); each is valid until the next one is asked for."""
    if not halves:
        yield from chunks_of(bytes_of(vector))
        return
    room = _Room(len(vector))
    for piece in _pieces(vector):
        high, low, scratch = room.of(len(piece))
        if planes == "h":
            # without a low plane that belongs to it, any rounding will do
            high.view(torch.bfloat16).copy_(piece)
            yield bytes_of(high)
        else:
            split(piece, high, low, scratch)
            yield bytes_of(high)
            yield bytes_of(low)


def receive(
    wire: BulkTransfer, keys: list[str], out: Tensor, *, halves: bool, rounded: bool
) -> None:
    """A vector into ``out`` (float32 ``[n]``). ``rounded``: the high plane, if there is one, is
    good enough, and only its keys are given. Raises as :meth:`BulkTransfer.load` does."""
    if not halves:
        for _ in wire.load(keys, chunks_of(bytes_of(out))):
            pass
        return
    room, pieces = _Room(len(out)), list(_pieces(out))
    if rounded:
        targets = [bytes_of(room.of(len(piece))[0]) for piece in pieces]
        for index in wire.load(keys, targets):
            widen(room.of(len(pieces[index]))[0], pieces[index])
        return
    targets = [bytes_of(half) for piece in pieces for half in room.of(len(piece))[:2]]
    for index in wire.load(keys, targets):
        if index % 2:
            piece = pieces[index // 2]
            high, low, scratch = room.of(len(piece))
            join(high, low, piece, scratch)


class _Room:
    """For one piece at a time."""

    def __init__(self, floats: int) -> None:
        most = min(floats, CHUNK_BYTES // 2)
        self._high = torch.empty(most, dtype=torch.int16)
        self._low = torch.empty(most, dtype=torch.int16)
        self._scratch = torch.empty(most, dtype=torch.int32)

    def of(self, floats: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._high[:floats], self._low[:floats], self._scratch[:floats]


def _pieces(vector: Tensor) -> Iterator[Tensor]:
    """Whose halves are chunks."""
    step = CHUNK_BYTES // 2
    for start in range(0, len(vector), step):
        yield vector[start : start + step]
