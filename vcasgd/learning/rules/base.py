"""Interface of a rule, its context, and the payload that a worker sends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.layout import DOUBLES, TensorKind, as_kind
from vcasgd.learning.vector import Floats, pieces_of
from vcasgd.spec.update import Staleness


class Payload(StrEnum):
    """Payload that a rule requires."""

    WEIGHTS = "weights"  #: The worker's copy w.
    DELTA = "delta"  #: Δ of the parameters, and the values of the statistics.


@dataclass(frozen=True)
class Context:
    """Properties of an update, in addition to its numbers.

    ``state`` is float32 ``[n]`` like the weights. All counts are of one shard.
    """

    staleness: int  #: τ: version when applied minus version trained from.
    epoch: int  #: e = 1, 2, …, of the update's subtask.
    parameters: int  #: Index in *this* vector or shard where the statistics start.
    state: Tensor | None = None  #: The rule's memory, initially zeros; changed in place.
    factor: float = 1.0  #: Factor of the step; below 1 while validation worsens.
    samples: float = 1.0  #: Weight of the update in its round, in samples.

    def piece(self, start: int, stop: int) -> Context:
        """Return the context of the elements ``[start, stop)``."""
        return replace(
            self,
            parameters=self.parameters - start,
            state=None if self.state is None else self.state[start:stop],
        )


class Rule:
    """Blends updates into the global vector.

    The rule object holds only its settings. Its memory is ``Context.state``, which is published
    with the weights.
    """

    #: Payload that the worker sends; see :func:`payload_of`.
    payload: ClassVar[Payload]
    #: True if the rule needs ``Context.state``.
    stateful: ClassVar[bool] = False
    #: True if updates are collected and applied together, in rounds.
    rounds: ClassVar[bool] = False
    #: α, by which a worker's copy moves towards W before an interval; 1: it starts from W.
    pull: float = 1.0

    def __init__(self, update: Any) -> None:
        """Create the rule from the ``update`` section of a job."""
        self._spec = update

    def blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        """Change ``weights`` (float32 ``[n]``) in place by ``update`` (float32 ``[n]``).

        For every rule, ``W ← W + f·(rule(W) − W)`` with ``f = context.factor``. Returns the weight
        of the update. Raises :class:`InvalidUpdate`, and changes nothing, if the lengths differ.
        """
        check_lengths(weights, update)
        if context.factor == 1:
            return self._blend(weights, update, context)
        before = weights.clone()
        weight = self._blend(weights, update, context)
        torch.lerp(before, weights, context.factor, out=weights)
        return weight * context.factor

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        raise NotImplementedError


def staleness_weight(spec: Staleness, tau: int) -> float:
    """Return s(τ) in (0, 1], with s(0) = 1 (FedAsync, Xie 2019, section 5.2).

    ``constant``: 1. ``polynomial``: (1+τ)^−a. ``hinge``: 1 if τ ≤ b, else 1/(a(τ−b)+1).
    A negative τ, which can follow from a restored snapshot, counts as 0.
    """
    late = max(tau, 0)
    match spec.function:
        case "constant":
            return 1.0
        case "polynomial":
            return math.pow(1 + late, -spec.a)
        case "hinge":
            return 1.0 if late <= spec.b else 1 / (spec.a * (late - spec.b) + 1)


def payload_of(
    rule_payload: Payload, layout_parameters: int, local: Tensor, base: Tensor, out: Tensor
) -> Tensor:
    """Return the vector that the worker sends; all vectors are float32 ``[n]``.

    WEIGHTS: ``local`` itself; ``out`` does not change. DELTA: ``out``, filled with
    ``local − base`` for the parameters and with ``local`` for the statistics after them.
    """
    if rule_payload is Payload.WEIGHTS:
        return local
    start = layout_parameters
    torch.sub(local[:start], base[:start], out=out[:start])
    out[start:].copy_(local[start:])
    return out


def interval_start(rule: Rule, local: Floats | None, base: Floats) -> Floats:
    """Return the start of a worker's next interval, float32 ``[n]``.

    It is ``base`` or, under the elastic rules, the worker's own copy moved by α towards the base:
    ``w ← w − α(w − W)``.
    """
    if local is None or rule.pull == 1:
        return base
    start = base.clone()
    for at, piece in pieces_of(start):
        own = local[at : at + len(piece)]
        torch.lerp(own, piece, rule.pull, out=piece)
    return start


def merge_integers(
    current: Tensor, update: Tensor, counters: Iterable[tuple[TensorKind, slice]]
) -> None:
    """Merge an update of integer state into ``current``, both int64 ``[n]``, in place.

    Each part is merged as its kind says. ``num_batches_tracked``, for example, is the largest one,
    because it must not decrease when a stale update arrives. Raises :class:`InvalidUpdate`, and
    changes nothing, if the lengths differ or a number is not finite.
    """
    check_lengths(current, update)
    parts = [(kind, as_kind(current[at], kind), as_kind(update[at], kind)) for kind, at in counters]
    for kind, _, new in parts:
        if kind in DOUBLES and not bool(new.isfinite().all()):
            raise InvalidUpdate("a counter is not finite", reason="integers")
    for kind, now, new in parts:
        match kind:
            case TensorKind.COUNT | TensorKind.SUM:
                now.add_(new)
            case TensorKind.LATEST:
                now.copy_(new)
            case TensorKind.MIN:
                torch.minimum(now, new, out=now)
            case _:
                torch.maximum(now, new, out=now)


def check_lengths(current: Tensor, update: Tensor) -> None:
    """Raise :class:`InvalidUpdate` if the shapes differ."""
    # torch would broadcast an update of one element to the whole vector
    if current.shape != update.shape:
        raise InvalidUpdate(
            f"an update of shape {list(update.shape)} for a vector of shape {list(current.shape)}",
            reason="length",
        )
