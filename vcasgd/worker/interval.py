"""The base of a push interval, and its result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from vcasgd.errors import SpecError
from vcasgd.learning.layout import Layout
from vcasgd.learning.rules import merge_integers
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Floats, copy_floats
from vcasgd.limits import MAX_INTEGERS_BYTES
from vcasgd.store.tensors.snapshot import RoundFacts, encode_integers
from vcasgd.task.logged import Sums


@dataclass(frozen=True)
class Base:
    """Model from which an interval starts: float32 [floats] and int64 [k].

    ``rollbacks`` is the number of times that training went back before it, of which
    ``restorations`` don't lower the learning rate, and ``round`` describes the round that made
    the version. ``continues``: the model is at this point already, after the interval before.
    """

    floats: Floats
    integers: Tensor
    rollbacks: int = 0
    restorations: int = 0
    version: int = 0
    round: RoundFacts = field(default_factory=RoundFacts)
    continues: bool = False


def continued(base: Base, update: Floats, parts: Iterable[ShardRange], out: Floats) -> Base:
    """Return a base that also contains the ``parts`` of an own update, float32 [floats].

    Its vector is ``out``, float32 [floats].
    """
    copy_floats(base.floats, out)
    for part in parts:
        add(part, out, update)
    return replace(base, floats=out)


def with_counters(base: Base, layout: Layout, changed: Tensor | None) -> Base:
    """Return a base that also has an own update's changes of integer state, int64 [counted]."""
    if changed is None:
        return base
    integers = base.integers.clone()
    merge_integers(integers[: layout.counted], changed, layout.counters)
    return replace(base, integers=integers)


def add(part: ShardRange, model: Floats, update: Floats) -> None:
    """Add a shard's part of an update to a model, both float32 [floats], on any devices.

    Parameters are added, and statistics replaced.
    """
    models, updates = part.of(model), part.of(update)
    models[: part.parameters] += updates[: part.parameters].to(models.device)
    models[part.parameters :] = updates[part.parameters :]


def encoded_counters(changed: Tensor | None) -> str:
    """Return the field ``integers`` of an update's header, of what :func:`counted` returned.

    Raises :class:`SpecError` if that is more than a header may have.
    """
    text = "" if changed is None else encode_integers(changed)
    if changed is not None and len(text) > MAX_INTEGERS_BYTES:
        raise SpecError(
            f"task: buffers that aren't averaged have {len(changed):,} numbers, and change; an "
            f"update has at most {MAX_INTEGERS_BYTES * 6 // 64:,}",
            remedy="declare large ones as mean or constant in the task's buffers",
            field="task",
        )
    return text


@dataclass(frozen=True)
class Trained:
    """Result of one push interval.

    ``stop`` is the sample where it ended, ``steps`` the number of local steps, ``update`` float32
    [floats] in the form that the rule needs, and ``integers`` int64 [k]. ``momentum`` is the
    optimizer's; None if it isn't tuned. ``skipped`` samples of the interval weren't trained.
    ``weight`` is that of its batches in samples; None if it is the number of the others.
    ``logged`` has what the user's code logged in it.
    """

    stop: int
    steps: int
    loss_sum: float
    update: Floats
    integers: Tensor
    momentum: float | None = None
    skipped: int = 0
    weight: float | None = None
    logged: Sums = field(default_factory=dict)
