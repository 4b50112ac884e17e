"""Rules that apply each update when it arrives.

``vc-asgd`` and ``sma`` blend the worker's weights ``w``, parameters and statistics alike: the
result lies between the old weights and the worker's, except for the momentum of ``sma``.
``async-local-sgd`` adds the worker's difference, ``Δ = w − w₀``.
"""

from __future__ import annotations

from torch import Tensor

from vcasgd.learning.rules.base import Context, Payload, Rule, staleness_weight
from vcasgd.spec.update import AsyncLocalSgdSpec as AsyncLocalSgdSpec
from vcasgd.spec.update import SmaSpec as SmaSpec
from vcasgd.spec.update import VcAsgdSpec as VcAsgdSpec


class VcAsgd(Rule):
    """``W ← αW + (1−α)w`` (VC-ASGD, Atre 2021), with the mixing weight 1−α multiplied by s(τ).

    ``alpha="var"`` is α = e/(e+1): an update has weight 1/2 in epoch 1, 1/3 in epoch 2, …
    """

    payload = Payload.WEIGHTS
    _spec: VcAsgdSpec

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        alpha = self._spec.alpha
        mixing = 1 / (context.epoch + 1) if alpha == "var" else 1 - alpha
        mixing *= staleness_weight(self._spec.staleness, context.staleness)
        weights.lerp_(update, mixing)
        return mixing


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

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        assert context.state is not None
        mixing = self._spec.moving_rate * staleness_weight(self._spec.staleness, context.staleness)
        start = max(context.parameters, 0)
        velocity = context.state[:start]
        velocity.mul_(self._spec.momentum)
        velocity.add_(update[:start], alpha=mixing).sub_(weights[:start], alpha=mixing)
        weights[:start].add_(velocity)
        weights[start:].lerp_(update[start:], mixing)
        return mixing


class AsyncLocalSgd(Rule):
    """``W ← W + η·s(τ)·Δ`` (asynchronous Local-SGD, Liu 2024).

    Workers send the values of statistics. These are blended as in VC-ASGD, with the mixing weight
    ``statistics_mix`` multiplied by s(τ).
    """

    payload = Payload.DELTA
    _spec: AsyncLocalSgdSpec

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        age = staleness_weight(self._spec.staleness, context.staleness)
        start = max(context.parameters, 0)
        weight = self._spec.eta * age
        weights[:start].add_(update[:start], alpha=weight)
        weights[start:].lerp_(update[start:], self._spec.statistics_mix * age)
        return weight
