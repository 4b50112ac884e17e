"""Update rules: how an update changes the global vector.

``W`` is the global vector, ``w`` the worker's copy, ``w₀`` the base it was trained from,
``Δ = w − w₀``, τ the staleness and s(τ) its weight. Every rule acts element by element, so a
vector can be cut into shards anywhere with the same result.

Running statistics (BatchNorm) are averaged, not summed: all workers measure the same quantity,
and a sum of differences would move it once per worker.

With ``rounds``, the default, all workers of a round train from the same version ``W``. Their copies
are averaged by samples, or by the weights of their batches in samples
(:mod:`vcasgd.learning.batch_weights`), ``W ← Σ nᵢwᵢ / Σ nᵢ = W + Σ nᵢΔᵢ / Σ nᵢ`` (local SGD, Stich
2018, arXiv 1805.09767), and the mean is the next version. It is always between the copies, so the
rule itself can't overshoot. A round without some of the workers moves the model by the part of the
job's batch that it has. An update that missed its round counts in the next one. If it missed more
than one, its weight is divided by the number of missed rounds.

The other rules apply each update when it arrives. ``vc-asgd`` and ``sma`` blend the worker's
weights, parameters and statistics alike: the result lies between the old weights and the worker's,
except for the momentum of ``sma``. ``async-local-sgd`` adds the worker's difference.

With ``rounds``, the job can also keep an exponential moving average of the parameters. A plain loop
averages after each step, ``e ← d·e + (1 − d)·w``. A parameter server sees a version ``w'`` only
after k steps from ``w``. On a straight line between both, step i ends at ``w + (i/k)·Δ`` with
``Δ = w' − w``, and the k steps of the plain loop add up to ``e ← dᵏ·e + (1 − dᵏ)·w + c·Δ`` with
``c = 1 − d·(1 − dᵏ) / (k·(1 − d))``.
"""

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
from vcasgd.spec.update import AsyncLocalSgdSpec, SmaSpec, Staleness, Update, VcAsgdSpec

#: Most that a sample of an update may weigh, as a multiple of the mean weight in the job's first
#: batch, so that no worker's updates outweigh those of all others.
MAX_HEAVIER = 16.0
#: Versions in the time that the average looks back, ``1 / (1 − d)`` steps, at least. Fewer would
#: leave more of the steps' noise in it.
VERSIONS = 16


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
    state: Tensor | None = None  #: The rule's memory, or a round's sum; changed in place.
    factor: float = 1.0  #: Factor of the step; below 1 while validation worsens.
    samples: float = 1.0  #: Weight of the update in its round, in samples.

    def piece(self, start: int, stop: int) -> Context:
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

    #: Payload that the worker sends.
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

    def blend(self, weights: Tensor, update: Tensor, context: Context) -> None:
        """Change ``weights`` (float32 ``[n]``) in place by ``update`` (float32 ``[n]``).

        For every rule, ``W ← W + f·(rule(W) − W)`` with ``f = context.factor``.
        """
        before = weights.clone() if context.factor != 1 else weights
        self._blend(weights, update, context)
        if context.factor != 1:
            torch.lerp(before, weights, context.factor, out=weights)

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> None:
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
    # A worker may have written the first version's counters, and torch would broadcast some shapes.
    if current.shape != update.shape:
        message = f"{len(update)} counters for a model with {len(current)}"
        raise InvalidUpdate(message, reason="length")
    parts = [(kind, as_kind(current[at], kind), as_kind(update[at], kind)) for kind, at in counters]
    for kind, _, new in parts:
        if kind in DOUBLES and not bool(new.isfinite().all()):
            raise InvalidUpdate("a counter is not finite", reason="integers")
    for kind, now, new in parts:
        match kind:
            case TensorKind.COUNT | TensorKind.SUM:
                now.add_(new)
            case TensorKind.LATEST | TensorKind.LATEST_FLOAT:
                now.copy_(new)
            case TensorKind.MIN:
                torch.minimum(now, new, out=now)
            case _:
                torch.maximum(now, new, out=now)


class Rounds(Rule):
    """``Context.state`` collects ``Σ nᵢΔᵢ``, and :meth:`finish` adds it.

    Running statistics arrive as values; the sum has their difference to W.
    """

    payload = Payload.DELTA
    rounds = True

    def blend(self, weights: Tensor, update: Tensor, context: Context) -> None:
        """Add an update to the sum. W doesn't change."""
        assert context.state is not None
        start = max(context.parameters, 0)
        context.state[:start].add_(update[:start], alpha=context.samples)
        context.state[start:].add_(update[start:] - weights[start:], alpha=context.samples)

    @staticmethod
    def finish(weights: Tensor, total: Tensor, samples: float, factor: float) -> None:
        """Add the mean of a round, ``factor · total / samples``; vectors are float32 ``[n]``."""
        weights.add_(total, alpha=factor / samples)


class VcAsgd(Rule):
    """``W ← αW + (1−α)w`` (VC-ASGD, Atre 2021), with the mixing weight 1−α multiplied by s(τ).

    ``alpha="var"`` is α = e/(e+1): an update has weight 1/2 in epoch 1, 1/3 in epoch 2, …
    """

    payload = Payload.WEIGHTS
    _spec: VcAsgdSpec

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> None:
        alpha = self._spec.alpha
        mixing = 1 / (context.epoch + 1) if alpha == "var" else 1 - alpha
        mixing *= staleness_weight(self._spec.staleness, context.staleness)
        weights.lerp_(update, mixing)


class Sma(Rule):
    """``v ← μv + α·s(τ)·(w − W)``, ``W ← W + v`` (synchronous model averaging, CROSSBOW,
    Koliousis 2019: ``z ← z + Σ c_j + μ(z − z_prev)``, ``c_j = α(w_j − z)``).

    Here each learner's correction is a separate step, so that there is no barrier; v is
    ``z − z_prev``. ``pull`` is the worker's half: it moves its copy by α towards the newest
    snapshot, ``w ← w − α(w − W)``, and continues from there. A new or restarted worker starts from
    W. With μ = 0 this is asynchronous EASGD (Zhang 2015). Statistics have no momentum, because it
    could make a variance negative.
    """

    payload = Payload.WEIGHTS
    stateful = True
    _spec: SmaSpec

    def __init__(self, update: SmaSpec) -> None:
        super().__init__(update)
        self.pull = update.moving_rate

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> None:
        assert context.state is not None
        mixing = self._spec.moving_rate * staleness_weight(self._spec.staleness, context.staleness)
        start = max(context.parameters, 0)
        velocity = context.state[:start]
        velocity.mul_(self._spec.momentum)
        velocity.add_(update[:start], alpha=mixing).sub_(weights[:start], alpha=mixing)
        weights[:start].add_(velocity)
        weights[start:].lerp_(update[start:], mixing)


class AsyncLocalSgd(Rule):
    """``W ← W + η·s(τ)·Δ`` (asynchronous Local-SGD, Liu 2024).

    Workers send the values of statistics. These are blended as in VC-ASGD, with the mixing weight
    ``statistics_mix`` multiplied by s(τ).
    """

    payload = Payload.DELTA
    _spec: AsyncLocalSgdSpec

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> None:
        age = staleness_weight(self._spec.staleness, context.staleness)
        start = max(context.parameters, 0)
        weights[:start].add_(update[:start], alpha=self._spec.eta * age)
        weights[start:].lerp_(update[start:], self._spec.statistics_mix * age)


_RULES: dict[str, type[Rule]] = {
    "rounds": Rounds,
    "vc-asgd": VcAsgd,
    "sma": Sma,
    "async-local-sgd": AsyncLocalSgd,
}


def make_rule(update: Update) -> Rule:
    return _RULES[update.rule](update)


def round_weight(samples: float, missed: float) -> float:
    """Return the weight of an update, in samples, that is ``missed`` rounds late."""
    return samples / max(missed, 1.0)


def average_coefficients(decay: float, steps: float) -> tuple[float, float]:
    """Return ``dᵏ`` and ``c`` for ``steps`` k > 0, which needn't be whole."""
    kept = decay**steps
    return kept, 1.0 + decay * math.expm1(steps * math.log(decay)) / (steps * (1.0 - decay))


def longest_interval(decay: float) -> float:
    """Return the most steps between two versions of which an average is made."""
    return max(1.0, 1.0 / ((1.0 - decay) * VERSIONS))
