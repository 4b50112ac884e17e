"""Chunks of payloads, vectors, and steps; those of a snapshot have float32, or bfloat16 halves.

If workers push bfloat16, each float32 number is split into two 16-bit halves: the high half is
the nearest bfloat16, and the low half is what is missing from it. Chunks ``h…`` hold the high
halves and chunks ``l…`` the low halves. Workers fetch only the high halves, at half the bytes.
The low halves are written for readers that need exact numbers: checkpoints, evaluations, and from
time to time the parameter server's successor.

With the bits of a number as an int32, the high half is ``(bits + 0x8000) >> 16``, rounded half
away from zero, and the low half is the low 16 bits as a signed number. So ``(high << 16) + low``
gives the bits back, in arithmetic modulo 2³². Rounding overflows to infinity only beyond 3.39e38.

A worker can fetch steps between the last versions instead of a whole snapshot, whose description
lists them, so they are published in the same commit. Their chunks ``d…`` are stored beside those of
the version that a step leads to, and stay for as long as they are listed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.steps import StepFormat
from vcasgd.store.bulk_transfer import BulkTransfer, Missing, WrongLength
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot import MAX_STEPS, Meta, PublishedStep

#: Strings near 1 MiB move fastest: smaller ones cost more calls, larger ones leave the cache. With
#: its header, a string of a whole MiB would take 1.25 from jemalloc. Blocks of all codecs fit.
CHUNK_BYTES = (1 << 20) - (1 << 12)


def chunk_count(size: int) -> int:
    """Return the number of chunks of ``size`` bytes."""
    return -(-size // CHUNK_BYTES)


def bytes_of(vector: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor without copying it."""
    return memoryview(vector.numpy().data).cast("B")


def chunks_of(payload: memoryview) -> list[memoryview]:
    """Return views of at most :data:`CHUNK_BYTES` each, without copying."""
    return [payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES)]


def chunk_names(floats: int, *, split: bool, exact: bool = True) -> list[str]:
    """Return the names of a whole vector's chunks, in the order in which they are written.

    ``split``: into high and low halves. ``exact``: with the low halves.
    """
    if not split:
        return [str(index) for index in range(chunk_count(floats * 4))]
    halves = "hl" if exact else "h"
    return [f"{half}{index}" for index in range(chunk_count(floats * 2)) for half in halves]


def outgoing(vector: Tensor, *, split: bool, exact: bool = True) -> Iterator[memoryview]:
    """Yield the chunks of a vector (float32 ``[n]``), named as :func:`chunk_names` does.

    Each chunk is valid until the next one is requested.
    """
    if not split:
        yield from chunks_of(bytes_of(vector))
        return
    buffers = _Buffers(len(vector))
    for piece in _pieces(vector):
        high, low, scratch = buffers.of(len(piece))
        if exact:
            split_halves(piece, high, low, scratch)
            yield bytes_of(high)
            yield bytes_of(low)
        else:
            # No low half has to match, so any rounding is good enough.
            high.view(torch.bfloat16).copy_(piece)
            yield bytes_of(high)


def receive(
    transfer: BulkTransfer, keys: list[str], out: Tensor, *, split: bool, exact: bool
) -> None:
    """Receive a vector into ``out`` (float32 ``[n]``) from chunks named by :func:`chunk_names`.

    Raises as :meth:`BulkTransfer.load` does.
    """
    if not split:
        for _ in transfer.load(keys, chunks_of(bytes_of(out))):
            pass
        return
    buffers, pieces = _Buffers(len(out)), list(_pieces(out))
    if not exact:
        targets = [bytes_of(buffers.of(len(piece))[0]) for piece in pieces]
        for index in transfer.load(keys, targets):
            widen(buffers.of(len(pieces[index]))[0], pieces[index])
        return
    targets = [bytes_of(half) for piece in pieces for half in buffers.of(len(piece))[:2]]
    for index in transfer.load(keys, targets):
        if index % 2:
            piece = pieces[index // 2]
            high, low, scratch = buffers.of(len(piece))
            join_halves(high, low, piece, scratch)


def split_halves(vector: Tensor, high: Tensor, low: Tensor, scratch: Tensor) -> None:
    """Split float32 ``[n]`` into two int16 ``[n]``.

    ``scratch`` is int32 ``[n]``. All tensors are contiguous.
    """
    bits = vector.view(torch.int32)
    torch.add(bits, 0x8000, out=scratch)
    high.copy_(scratch.bitwise_right_shift_(16))
    low.copy_(bits)


def join_halves(high: Tensor, low: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Invert :func:`split_halves`; ``out`` is float32 ``[n]``."""
    bits = out.view(torch.int32)
    bits.copy_(high).bitwise_left_shift_(16)
    bits.add_(scratch.copy_(low))


def widen(high: Tensor, out: Tensor) -> None:
    """Convert the high halves alone, int16 ``[n]``, to float32 ``[n]``."""
    out.copy_(high.view(torch.bfloat16))


class _Buffers:
    """Memory for the halves of one piece at a time."""

    def __init__(self, floats: int) -> None:
        most = min(floats, CHUNK_BYTES // 2)
        self._high = torch.empty(most, dtype=torch.int16)
        self._low = torch.empty(most, dtype=torch.int16)
        self._scratch = torch.empty(most, dtype=torch.int32)

    def of(self, floats: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return high half, low half and scratch memory of a piece."""
        return self._high[:floats], self._low[:floats], self._scratch[:floats]


def _pieces(vector: Tensor) -> Iterator[Tensor]:
    """Yield pieces whose halves are one chunk each."""
    step = CHUNK_BYTES // 2
    for start in range(0, len(vector), step):
        yield vector[start : start + step]


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepTo:
    """The stored step that leads to a version, in ``size`` bytes."""

    version: int
    token: int
    size: int


def steps_to(present: Meta) -> list[StepTo]:
    """Return all steps of a description, the newest last."""
    ends = [(step.version, step.token) for step in present.steps[1:]]
    ends.append((present.version, present.token))
    pairs = zip(present.steps, ends, strict=False)
    return [StepTo(*end, step.size) for step, end in pairs]


def path(present: Meta, base: tuple[int, int] | None) -> Sequence[StepTo] | None:
    """Return the steps from a base, its version and writer, to the present version.

    Returns None if there is no such path, or if the whole vector has no more bytes.
    """
    starts = [(step.version, step.token) for step in present.steps]
    if base not in starts:
        return None
    steps = steps_to(present)[starts.index(base) :]
    return steps if sum(step.size for step in steps) < 4 * present.floats else None


def extended(before: Meta, size: int) -> tuple[PublishedStep, ...]:
    """Return the list of the version after ``before``, to which a step of ``size`` bytes leads.

    It has as many of the last steps as are worth fetching.
    """
    steps = (*before.steps, PublishedStep(before.version, before.token, size))[-MAX_STEPS:]
    while steps and sum(step.size for step in steps) >= 4 * before.floats:
        steps = steps[1:]
    return steps


def chunks_of_step(keys: TensorKeys, step: StepTo) -> list[str]:
    return [
        keys.snapshot_chunk(step.version, step.token, f"d{index}")
        for index in range(chunk_count(step.size))
    ]


def add_steps(
    transfer: BulkTransfer,
    keys: TensorKeys,
    steps: Sequence[StepTo],
    out: Tensor,
    form: StepFormat,
) -> bool:
    """Add stored steps to ``out``, float32 [floats]; return False if one is missing or invalid.

    ``out`` is then undefined.
    """
    try:
        for step in steps:
            if not form.payload.fits(step.size):
                log.warning("a step can't have %d bytes", step.size)
                return False
            received = memoryview(bytearray(step.size))
            for _ in transfer.load(chunks_of_step(keys, step), chunks_of(received)):
                pass
            form.apply(received, out)
    except Missing:
        return False
    except (WrongLength, InvalidUpdate) as error:
        log.warning("a step can't be read: %s", error)
        return False
    return True
