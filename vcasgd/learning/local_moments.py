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

    v_B = μ² + σ²/B = v - (1 - b/B)·(v - q)/(1 - r)     (r is larger in the first steps),

which is never less than ``v·b/B``, the noise of the whole batch alone.

Both are derived for the steps of torch's own classes, so other optimizers are left alone: their
``exp_avg`` can have another role. With β₁ = 0, q is v and says nothing about the noise; β₂ = 0
keeps no second moments; and AMSGrad divides by the largest v that there was.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from vcasgd.learning.base import as_real
from vcasgd.learning.optimizers import name_of, parts_of, trained_by
from vcasgd.learning.vector import local_part

#: Numbers that are corrected at a time, which bounds the memory for it. A multiple of the width of
#: any vector instruction, so that each number is computed as in one piece.
PIECE = 1 << 22

#: Times the steps that first moments look back, after which their number doesn't matter.
_FIRST_STEPS = 20

#: Names of first moments in the states of SGD and Adam.
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")


@dataclass
class NoiseMoments:
    """Exponential sums of squared gradients, ``own``, and of squared first moments, ``mean``."""

    own: Tensor
    mean: Tensor


class LocalMoments:
    """Corrects the first moments of SGD, Adam, and AdamW, and the second ones of the latter two,
    until :meth:`close`.

    Subclasses count if they have no ``step`` of their own. Second moments need two more vectors of
    the size of the parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        #: The local batch as a share of the job's, in (0, 1]. With 1, Adam isn't changed.
        self.share = 1.0
        self.by_parameter: dict[Tensor, NoiseMoments] = {}
        #: Names of the first moments that are corrected.
        parts = parts_of(optimizer)
        self._corrected = [part for part in parts if steps_as(part, SGD, Adam, AdamW)]
        self.first_moments = FIRST_MOMENTS if self._corrected else ()
        self._adams = [part for part in parts if steps_as(part, Adam, AdamW)]
        self._hooks = [part.register_step_pre_hook(self._before_step) for part in self._adams]

    def state(self) -> dict[str, Any]:
        """Return the corrections for the same optimizer in another process."""
        numbers = {each: number for number, each in enumerate(trained_by(self._optimizer))}
        noise = {numbers[each]: moments for each, moments in self.by_parameter.items()}
        return {"share": self.share, "noise": noise}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        parameters = trained_by(self._optimizer)
        self.share = state["share"]
        self.by_parameter = {parameters[each]: noise for each, noise in state["noise"].items()}

    def close(self) -> None:
        """Leave the optimizer alone from now on."""
        for hook in self._hooks:
            hook.remove()

    @property
    def corrects_noise(self) -> bool:
        """True if second moments are corrected, by the differences of successive gradients."""
        return bool(self._adams)

    @property
    def uncorrected(self) -> str:
        """Name of an optimizer with moments of the local batch, for people; empty if it has none.

        That is one whose moments aren't corrected, or not completely.
        """
        name = name_of(self._optimizer)
        if len(self._corrected) < len(parts_of(self._optimizer)):
            return name
        groups = [group for part in self._adams for group in part.param_groups]
        if any(group["amsgrad"] for group in groups):
            return f"{name} with amsgrad"
        if not all(_measures_noise(group) for group in groups):
            return f"{name} with a beta of 0"
        return ""

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Adapt to the share of the next steps."""
        factor, self.share = self.share / share, share
        if factor == 1:
            return
        for state in [state for part in self._corrected for state in part.state.values()]:
            for name in self.first_moments:
                if isinstance(first := state.get(name), Tensor):
                    first.mul_(factor)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if getattr(optimizer, "found_inf", None):
            # A fused optimizer skips the step itself.
            return
        for group in optimizer.param_groups:
            if not _measures_noise(group):
                continue
            for parameter in group["params"]:
                state, gradient = optimizer.state.get(parameter), parameter.grad
                # Adam refuses a sparse gradient by itself.
                if state and gradient is not None and not gradient.is_sparse:
                    self._correct(parameter, gradient, state, group, isinstance(optimizer, AdamW))

    def _correct(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        decoupled: bool,
    ) -> None:
        """Set ``exp_avg_sq`` so that its next value is the v of the whole batch."""
        moments = self.by_parameter.get(parameter)
        if moments is None:
            if self.share == 1:
                return
            # So far the first moments are a single gradient, or one of the whole batch.
            used, _ = local_part(state["exp_avg_sq"])
            moments = self.by_parameter[parameter] = NoiseMoments(used.clone(), used.clone())
        first, second = map(float, group["betas"])
        step = int(state["step"]) + 1
        unbias, noisier = 1 - first**step, _noisier(first, second, max(step, 2))
        adams = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        vectors = (*(local_part(each)[0] for each in adams), moments.own, moments.mean)
        # Adam keeps moments of the real and of the imaginary parts.
        for parameter_, gradient_, momentum, out, own, mean in _pieces(*map(as_real, vectors)):
            averaged = _averaged(parameter_, gradient_, group, decoupled=decoupled)
            squared = averaged.square()
            own.lerp_(squared, 1 - second)
            unbiased = torch.lerp(momentum, averaged, 1 - first).div_(unbias)
            mean.lerp_(unbiased.square_(), 1 - second)
            noise = (own - mean).clamp_(min=0).div_(noisier)
            used = torch.maximum(torch.sub(own, noise, alpha=1 - self.share), own * self.share)
            out.copy_(used.sub_(squared.mul_(1 - second)).div_(second))


@lru_cache(maxsize=4096)
def _noisier(first: float, second: float, step: int) -> float:
    """Return ``1 − r`` as the mean over all steps until this one, weighted as in v.

    A first moment of s gradients is a mean of fewer than ``1/r``: their weights ``β₁ⁱ`` add up to
    ``(1 - β₁ˢ)/(1 - β₁)``, so ``rₛ = r·(1 + β₁ˢ)/(1 - β₁ˢ)``, which is r after the first steps.
    """
    ratio = (1 - first) / (1 + first)
    steps = np.arange(1, min(step, _FIRST_STEPS / (1 - first)) + 1)
    excess = 2 * ratio * first**steps / (1 - first**steps)
    weights = second ** (step - steps) * (1 - second) / (1 - second**step)
    return float(1 - ratio - weights @ excess)


def steps_as(optimizer: Optimizer, *classes: type[Optimizer]) -> bool:
    """Return True if an optimizer makes the steps of one of torch's classes.

    A subclass with a ``step`` of its own doesn't.
    """
    # torch wraps the steps of each class that is used.
    own = inspect.unwrap(type(optimizer).step)
    return any(own is inspect.unwrap(each.step) for each in classes)


def _measures_noise(group: dict[str, Any]) -> bool:
    """Return True if one of Adam's groups has moments that show the noise of its gradients."""
    return not group["amsgrad"] and min(group["betas"]) > 0


def _averaged(
    parameter: Tensor, gradient: Tensor, group: dict[str, Any], *, decoupled: bool
) -> Tensor:
    """Return the gradient whose moments Adam keeps.

    ``decoupled`` is true if the weight decay is no part of it, for versions of torch whose groups
    don't say so.
    """
    if group["maximize"]:
        gradient = -gradient
    decay = float(group["weight_decay"])
    if decay and not group.get("decoupled_weight_decay", decoupled):
        gradient = gradient.add(parameter, alpha=decay)
    return gradient


def _pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same pieces of tensors of one shape; all at once if one isn't contiguous."""
    if not all(each.is_contiguous() for each in vectors):
        return iter([vectors])
    return zip(*(torch.split(each.view(-1), PIECE) for each in vectors), strict=True)
