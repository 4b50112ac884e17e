"""Update rules: how an update changes the global vector.

``W`` is the global vector, ``w`` the worker's copy, ``w₀`` the base it was trained from,
``Δ = w − w₀``, τ the staleness and s(τ) its weight. Every rule acts element by element, so a
vector can be cut into shards anywhere and the result is the same.

Running statistics (BatchNorm) are averaged and never summed: each worker has measured the
same quantity, and a sum of differences would move it once per worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.staleness import weight
from vcasgd.spec import AsyncLocalSgd, Staleness, Update, VcAsgd


class Payload(StrEnum):
    """What a rule wants to be sent."""

    WEIGHTS = "weights"  #: w
    DELTA = "delta"  #: Δ of the parameters, and the values of the statistics


@dataclass(frozen=True)
class Context:
    """What a rule knows of an update beside its numbers."""

    staleness: int  #: τ: version when applied − version trained from
    epoch: int  #: e = 1, 2, … of the update's subtask
    parameters: int  #: index in *this* vector or shard where the statistics start


class Rule(Protocol):
    """Blends updates into the global vector; holds no state of its own."""

    @property
    def payload(self) -> Payload:
        """What the worker has to send, see :func:`payload_of`."""

    def blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        """Changes ``weights`` (float32 ``[n]``) in place by ``update`` (float32 ``[n]``).

        Returns the weight that the update was given. Raises :class:`InvalidUpdate`, with
        nothing changed, if the lengths differ.
        """


@dataclass(frozen=True)
class VcAsgdRule:
    """``W ← αW + (1−α)w`` (VC-ASGD, Atre 2021), the mixing weight 1−α multiplied by s(τ).

    ``alpha="var"`` is α = e/(e+1): the newcomer has weight 1/2 in epoch 1, 1/3 in epoch 2, …
    """

    alpha: float | Literal["var"]
    staleness: Staleness
    payload: ClassVar[Payload] = Payload.WEIGHTS

    def blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        """Parameters and statistics alike; returns (1−α)·s(τ)."""
        _check_lengths(weights, update)
        mixing = self._mixing(context.epoch) * weight(self.staleness, context.staleness)
        weights.lerp_(update, mixing)
        return mixing

    def _mixing(self, epoch: int) -> float:
        return 1 / (epoch + 1) if self.alpha == "var" else 1 - self.alpha


@dataclass(frozen=True)
class AsyncLocalSgdRule:
    """``W ← W + η·s(τ)·Δ`` for the parameters (asynchronous Local-SGD, Liu 2024).

    The statistics blend as in VC-ASGD, with the mixing weight ``statistics_mix``·s(τ).
    """

    eta: float
    statistics_mix: float
    staleness: Staleness
    payload: ClassVar[Payload] = Payload.DELTA

    def blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        """Returns η·s(τ), the weight of the parameters' difference."""
        _check_lengths(weights, update)
        age = weight(self.staleness, context.staleness)
        start = max(context.parameters, 0)
        weights[:start].add_(update[:start], alpha=self.eta * age)
        weights[start:].lerp_(update[start:], self.statistics_mix * age)
        return self.eta * age


def make_rule(update: Update) -> Rule:
    """The rule that a job asks for."""
    match update:
        case VcAsgd():
            return VcAsgdRule(update.alpha, update.staleness)
        case AsyncLocalSgd():
            return AsyncLocalSgdRule(update.eta, update.statistics_mix, update.staleness)


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


def merge_integers(current: Tensor, update: Tensor) -> None:
    """Element-wise maximum of int64 ``[n]`` vectors, in place.

    Integers are counters such as ``num_batches_tracked``, which must not run backwards when
    a stale update arrives. Raises :class:`InvalidUpdate` if the lengths differ.
    """
    _check_lengths(current, update)
    torch.maximum(current, update, out=current)


def _check_lengths(current: Tensor, update: Tensor) -> None:
    # torch would broadcast an update of one element to the whole vector
    if current.shape != update.shape:
        raise InvalidUpdate(
            f"an update of shape {list(update.shape)} for a vector of shape {list(current.shape)}",
            reason="length",
        )
