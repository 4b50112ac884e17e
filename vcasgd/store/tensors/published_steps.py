"""Steps between the last versions of a snapshot, which a worker can fetch instead of the whole one.

The description of a snapshot lists them, so they are published in the same commit. Their chunks
``d…`` are stored beside those of the version that a step leads to, and stay for as long as they
are listed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.steps import StepFormat
from vcasgd.store.bulk_transfer import BulkTransfer, Missing, WrongLength
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.chunks import chunk_count, chunks_of
from vcasgd.store.tensors.snapshot import MAX_STEPS, Meta, PublishedStep

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
    """Return the keys of the chunks of a step."""
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
