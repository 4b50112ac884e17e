"""Moments of a worker's optimizer, as they would be with the job's whole batch.

**First moments.** The mean of the workers' copies moves by the mean of their first moments,
weighted by their shares of the batch. So a gradient counts by the share that its worker has *now*.
A worker that is left alone would suddenly follow its own few samples four times as far as four
workers together would have, for about ten steps. Therefore the first moments are divided by the
factor by which a share changes: then each gradient keeps the weight that it had in its own step,
and the sum over all workers stays as it is.

**Second moments.** A worker trains with a part of the batch, so its gradients are noisier.
Averaging the models of a round removes the noise from the model, but Adam divides by ``√v``, the
root mean square of the worker's own gradients, of which their noise is a part: ``v = μ² + σ²/b``
for a batch of b samples. Its first moments are a mean of about ``1/r`` gradients, so the mean of
their squares is ``q = μ² + r·σ²/b`` with ``r = (1 - β₁)/(1 + β₁)``. From both follows v for the
job's batch B,

    v_B = μ² + σ²/B = v - (1 - b/B)·(v - q)/(1 - r),

which is never less than ``v·b/B``, the noise of the whole batch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: Numbers that are corrected at a time, which bounds the memory for it. A multiple of the width of
#: any vector instruction, so that each number is computed as in one piece.
PIECE = 1 << 22

#: Names of first moments in the states of optimizers.
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")


@dataclass
class _Moments:
    """Exponential sums of squared gradients, ``own``, and of squared first moments, ``mean``."""

    own: Tensor
    mean: Tensor


class LocalMoments:
    """Corrects the first moments of PyTorch's optimizers, and the second ones of Adam and AdamW.

    The latter need two more vectors of the size of the parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        #: The local batch as a share of the job's, in (0, 1]. With 1, Adam isn't changed.
        self.share = 1.0
        self._moments: dict[Tensor, _Moments] = {}
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Adapt to the share of the next steps."""
        factor, self.share = self.share / share, share
        if factor == 1:
            return
        for state in self._optimizer.state.values():
            for name in FIRST_MOMENTS:
                if isinstance(first := state.get(name), Tensor):
                    first.mul_(factor)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if getattr(optimizer, "found_inf", None):
            # A fused optimizer skips the step itself.
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state and parameter.grad is not None and _is_adam(group, state):
                    self._correct(parameter, parameter.grad, state, group["betas"])

    def _correct(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], betas: tuple[float, float]
    ) -> None:
        """Set ``exp_avg_sq`` so that its next value is the v of the whole batch."""
        moments = self._moments.get(parameter)
        if moments is None:
            if self.share == 1:
                return
            # So far the first moments are a single gradient, or one of the whole batch.
            second = state["exp_avg_sq"]
            moments = self._moments[parameter] = _Moments(second.clone(), second.clone())
        first, second = betas
        unbias = 1 - first ** (int(state["step"]) + 1)
        vectors = (gradient, state["exp_avg"], state["exp_avg_sq"], moments.own, moments.mean)
        for gradient_, momentum, out, own, mean in _pieces(vectors):
            squared = gradient_.square()
            own.lerp_(squared, 1 - second)
            unbiased = torch.lerp(momentum, gradient_, 1 - first).div_(unbias)
            mean.lerp_(unbiased.square_(), 1 - second)
            noise = (own - mean).clamp_(min=0).div_(2 * first / (1 + first))
            used = torch.maximum(torch.sub(own, noise, alpha=1 - self.share), own * self.share)
            out.copy_(used.sub_(squared.mul_(1 - second)).div_(second))


def _pieces(vectors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same pieces of tensors of one shape; all at once if one isn't contiguous."""
    if not all(each.is_contiguous() for each in vectors):
        return iter([vectors])
    return zip(*(torch.split(each.view(-1), PIECE) for each in vectors), strict=True)


def _is_adam(group: dict[str, Any], state: dict[str, Any]) -> bool:
    return "betas" in group and "exp_avg_sq" in state and not group.get("amsgrad")
