"""What a rule is, what it is told, and what a worker sends to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from vcasgd.errors import InvalidUpdate


class Payload(StrEnum):
    """What a rule wants to be sent."""

    WEIGHTS = "weights"  #: w
    DELTA = "delta"  #: Δ of the parameters, and the values of the statistics


@dataclass(frozen=True)
class Context:
    """What a rule knows of an update beside its numbers.

    ``state`` and ``base`` are float32 ``[n]`` as the weights are. All counts are of one shard.
    """

    staleness: int  #: τ: version when applied − version trained from
    epoch: int  #: e = 1, 2, … of the update's subtask
    parameters: int  #: index in *this* vector or shard where the statistics start
    number: int = 1  #: of the update: the version that it makes
    ends_epoch: bool = False  #: whether with it an epoch is complete
    state: Tensor | None = None  #: the rule's memory, zeros at first; changed in place
    base: Tensor | None = None  #: w₀, where it is remembered
    factor: float = 1.0  #: by which the rule's step is multiplied, while validation worsens

    def piece(self, start: int, stop: int) -> Context:
        """The same for the elements ``[start, stop)``."""
        return replace(
            self,
            parameters=self.parameters - start,
            state=None if self.state is None else self.state[start:stop],
            base=None if self.base is None else self.base[start:stop],
        )


class Rule:
    """Blends updates into the global vector. What it has to remember is in ``Context.state``,
    which is published with the weights; the rule itself holds its settings."""

    #: what the worker has to send, see :func:`payload_of`
    payload: ClassVar[Payload]
    #: whether it needs ``Context.state``
    stateful: ClassVar[bool] = False
    #: how many published versions it wants to be remembered for ``Context.base``
    history: int = 0
    #: α, by which a worker's own copy moves towards W before it trains on; 1: it starts from W
    pull: float = 1.0

    def __init__(self, update: Any) -> None:
        """``update``: the part of the job that has the rule's name."""
        self._spec = update

    def blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        """Changes ``weights`` (float32 ``[n]``) in place by ``update`` (float32 ``[n]``).

        Whatever the rule is, ``W ← W + f·(rule(W) − W)`` with ``f = context.factor``. Returns the
        weight that the update was given. Raises :class:`InvalidUpdate`, with nothing changed, if
        the lengths differ.
        """
        check_lengths(weights, update)
        if context.factor == 1:
            return self._blend(weights, update, context)
        before = weights.clone()
        given = self._blend(weights, update, context)
        torch.lerp(before, weights, context.factor, out=weights)
        return given * context.factor

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        raise NotImplementedError


def payload_of(
    rule_payload: Payload, layout_parameters: int, local: Tensor, base: Tensor, out: Tensor
) -> Tensor:
    """What the worker sends, all vectors float32 ``[n]``.

    WEIGHTS: ``local`` itself, and ``out`` stays as it is. DELTA: ``out``, filled with
    ``local − base`` for the parameters and with ``local`` for the statistics behind them.
    """
    if rule_payload is Payload.WEIGHTS:
        return local
    start = layout_parameters
    torch.sub(local[:start], base[:start], out=out[:start])
    out[start:].copy_(local[start:])
    return out


def pulled(rule: Rule, local: Tensor | None, base: Tensor) -> Tensor:
    """Where a worker starts an interval, float32 ``[n]``: at ``base``, or, under the elastic
    rules, where its own copy is after it has moved by α towards it: ``w ← w − α(w − W)``."""
    if local is None or rule.pull == 1:
        return base
    return torch.lerp(local, base, rule.pull)


def merge_integers(current: Tensor, update: Tensor) -> None:
    """Element-wise maximum of int64 ``[n]`` vectors, in place.

    Integers are counters such as ``num_batches_tracked``, which must not run backwards when
    a stale update arrives. Raises :class:`InvalidUpdate` if the lengths differ.
    """
    check_lengths(current, update)
    torch.maximum(current, update, out=current)


def check_lengths(current: Tensor, update: Tensor) -> None:
    """Raises :class:`InvalidUpdate`."""
    # torch would broadcast an update of one element to the whole vector
    if current.shape != update.shape:
        raise InvalidUpdate(
            f"an update of shape {list(update.shape)} for a vector of shape {list(current.shape)}",
            reason="length",
        )
