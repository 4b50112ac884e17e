"""Rules that add the worker's difference, ``Δ = w − w₀``.

Workers send the values of statistics. These are blended as in VC-ASGD, with the mixing weight
``statistics_mix`` multiplied by the weight of the update's age.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vcasgd.learning.rules.base import Context, Payload, Rule, staleness_weight
from vcasgd.spec.update import AsyncLocalSgdSpec as AsyncLocalSgdSpec
from vcasgd.spec.update import DcAsgdSpec as DcAsgdSpec
from vcasgd.spec.update import DelayedNesterovSpec as DelayedNesterovSpec
from vcasgd.spec.update import DownpourSpec as DownpourSpec
from vcasgd.spec.update import FedBuffSpec as FedBuffSpec


class Differences(Rule):
    """Base class: blends the statistics; a subclass adds the parameters."""

    payload = Payload.DELTA
    _spec: AsyncLocalSgdSpec | DownpourSpec | DelayedNesterovSpec | FedBuffSpec | DcAsgdSpec

    def _blend(self, weights: Tensor, update: Tensor, context: Context) -> float:
        age = self._age(context.staleness)
        start = max(context.parameters, 0)
        weight = self._add(weights[:start], update[:start], context.piece(0, start), age)
        weights[start:].lerp_(update[start:], self._spec.statistics_mix * age)
        return weight

    def _age(self, staleness: int) -> float:
        assert not isinstance(self._spec, DownpourSpec)
        return staleness_weight(self._spec.staleness, staleness)

    def _add(
        self,
        weights: Tensor,
        delta: Tensor,
        context: Context,  # noqa: ARG002 - for stateful rules
        age: float,
    ) -> float:
        """Add Δ with the weight ``age``, s(τ), to the parameters; return its total weight."""
        weights.add_(delta, alpha=self._spec.eta * age)
        return self._spec.eta * age


class AsyncLocalSgd(Differences):
    """``W ← W + η·s(τ)·Δ`` (asynchronous Local-SGD, Liu 2024)."""


class Downpour(Differences):
    """``W ← W + η·Δ/max(τ, 1)`` (staleness-aware asynchronous SGD, Zhang 2016).

    The paper divides the learning rate of a gradient by its staleness, ``W ← W − (lr/τ)·g``;
    Δ is −lr times the gradients of the worker's local steps.
    """

    def _age(self, staleness: int) -> float:
        return 1 / max(staleness, 1)


class DelayedNesterov(Differences):
    """``W ← W + η·s(τ)·Δ/N`` with each update, and with each N-th also ``W ← W + ηβm``, where
    ``m ← βm + (1/N)·Σ s(τᵢ)Δᵢ`` over the last N (Liu 2024, its Delayed Nesterov with c = 0).

    The paper's pseudo-gradient is −Δ. One vector holds both m and the current sum:
    ``v ← v + s(τ)·Δ/N`` with each update, so that v is m at each N-th update, and then
    ``v ← βv``.
    """

    stateful = True
    _spec: DelayedNesterovSpec

    def _add(self, weights: Tensor, delta: Tensor, context: Context, age: float) -> float:
        assert context.state is not None
        spec, share = self._spec, age / self._spec.buffer
        weights.add_(delta, alpha=spec.eta * share)
        context.state.add_(delta, alpha=share)
        if context.number % spec.buffer == 0:
            context.state.mul_(spec.momentum)
            weights.add_(context.state, alpha=spec.eta)
        return spec.eta * share


class FedBuff(Differences):
    """``W ← W + (η/K)·Σ s(τᵢ)Δᵢ`` with each K-th update (Nguyen 2022).

    The current sum is the rule's state. It is also added at the end of an epoch, so that the
    evaluated model and the final model contain every update; each has the same weight η/K.
    """

    stateful = True
    _spec: FedBuffSpec

    def _add(self, weights: Tensor, delta: Tensor, context: Context, age: float) -> float:
        assert context.state is not None
        share = self._spec.eta / self._spec.buffer
        context.state.add_(delta, alpha=age)
        if context.number % self._spec.buffer == 0 or context.ends_epoch:
            weights.add_(context.state, alpha=share)
            context.state.zero_()
        return share * age


class DcAsgd(Differences):
    """``W ← W + η·s(τ)·(Δ − λ·Δ⊙Δ⊙(W − w₀))`` (delay compensation, Zheng 2017).

    Sign and scale. The gradient at W is, to first order, ``g(W) ≈ g + H(W − w₀)``, and the paper
    approximates the Hessian H by λ′·g⊙g. A worker that made K steps of rate ``lr`` has
    ``Δ = −lr·K·ḡ`` with the mean gradient ḡ, so ``ḡ = −Δ/(lr·K)`` and ``ḡ⊙ḡ = Δ⊙Δ/(lr·K)²``.
    With the gradient at W instead, each step would have been corrected by
    ``−lr·λ′·ḡ⊙ḡ⊙(W − w₀)``, and all K steps by ``−(λ′/(lr·K))·Δ⊙Δ⊙(W − w₀)``. So the sign is
    minus, and λ = λ′/(lr·K). Explicit momentum μ makes steps of about lr/(1−μ).

    The approximation is of first order, so the corrected update is limited to between 0 and 2Δ:
    ``λ·Δ⊙(W − w₀)`` is clipped to [−1, 1]. If the server no longer has w₀, the update is added
    without a correction.
    """

    _spec: DcAsgdSpec

    def __init__(self, update: DcAsgdSpec) -> None:
        super().__init__(update)
        self.history = update.history

    def _add(self, weights: Tensor, delta: Tensor, context: Context, age: float) -> float:
        weight = self._spec.eta * age
        if context.base is not None:
            drift = torch.sub(weights, context.base).mul_(delta).mul_(self._spec.compensation)
            weights.addcmul_(delta, drift.clamp_(-1, 1), value=-weight)
        weights.add_(delta, alpha=weight)
        return weight
