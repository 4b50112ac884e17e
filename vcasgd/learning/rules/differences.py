"""Rule that adds the worker's difference, ``Δ = w − w₀``."""

from __future__ import annotations

from torch import Tensor

from vcasgd.learning.rules.base import Context, Payload, Rule, staleness_weight
from vcasgd.spec.update import AsyncLocalSgdSpec as AsyncLocalSgdSpec


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
