"""The state of a worker's optimizer, as it would be in one process with the job's whole batch.

A worker trains with a part of the batch, so its gradients are noisier. Averaging the models of a
round removes the noise from the model, but not from the optimizers' state. That state isn't sent;
it follows from how far the model moved.

**First moments.** All workers of a round start from the same model with the same momentum m₀, and
move it by ``−r·(c·m₀ + Σⱼ aⱼ·gⱼ)``, where gⱼ are their gradients, r is ``1/√v`` for Adam and 1 for
SGD, and c and aⱼ follow from the learning rates and β₁. This is linear, so the mean of all copies
moved by the same with the mean gradients of all workers. Hence every worker knows the mean gradient
of the round, ``ĝ = (−D/r − c·m₀)/Σaⱼ`` for a motion D, and continues with the momentum
``β₁ᴴ·m₀ + (1 − β₁ᴴ)·ĝ`` after H steps (for SGD, a sum instead of a mean).

**Second moments.** Adam divides by ``√v``, the mean of squared gradients, of which the noise is a
part: ``v = μ² + σ²/b`` for a batch of b samples. A worker knows it for its own batch b, and from ĝ
for the N samples of a round. Between the two it is linear in 1/b, which gives v for the job's batch
B. It stays the same during a round, so that r is the same for all workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_State = dict[str, Any]


@dataclass
class _Mean:
    """Exponential mean of squared gradients, with the sum of its weights."""

    total: Tensor
    weight: float

    def add(self, squared: Tensor, decay: float) -> None:
        self.total.lerp_(squared, 1 - decay)
        self.weight = decay * self.weight + 1 - decay

    @property
    def value(self) -> Tensor:
        return self.total / self.weight


@dataclass
class _Second:
    """Second moments of a parameter under Adam.

    ``own`` is that of this worker, ``shared`` that of the rounds, and ``used`` v in this round.
    """

    own: _Mean
    shared: _Mean
    used: Tensor


@dataclass
class _Response:
    """Motion of a group's parameters in an interval: c, Σaⱼ, the sum of the rates, the steps."""

    of_start: float = 0.0
    of_gradient: float = 0.0
    rates: float = 0.0
    steps: int = 0


class LocalMoments:
    """Keeps the state of Adam, AdamW, and SGD with momentum; other optimizers stay as they are.

    It needs one more vector of the size of the parameters, with Adam four.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._share = 1.0
        self._start: dict[Tensor, Tensor] = {}
        self._second: dict[Tensor, _Second] = {}
        self._responses = [_Response() for _ in optimizer.param_groups]
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def begin(self, share: float, rounds: float) -> None:
        """Start an interval whose local batches are ``share`` of the job's, in (0, 1].

        ``rounds`` is the number of samples of a round in batches of the job. With the whole batch,
        the optimizer does the same as in one process.
        """
        self._share = share
        self._responses = [_Response() for _ in self._optimizer.param_groups]
        self._start = {}
        for _, group, parameter, state in self._states():
            momentum = _momentum(group, state)
            if share < 1 and momentum is not None:
                self._start[parameter] = momentum.clone()
            if _is_adam(group, state):
                self._begin_second(parameter, state, group["betas"][1], rounds)

    def _begin_second(self, parameter: Tensor, state: _State, beta: float, rounds: float) -> None:
        second, weight = self._second.get(parameter), 1 - beta ** int(state["step"])
        if self._share == 1:
            if second is not None:
                state["exp_avg_sq"].copy_(second.used).mul_(weight)
                del self._second[parameter]
            return
        if second is None:
            own, shared = (_Mean(state["exp_avg_sq"].clone(), weight) for _ in range(2))
            second = self._second[parameter] = _Second(own, shared, own.value)
        # Linear in the inverse of the batch: 1 for the job's, 1/share for the worker's own.
        part = max(0.0, (1 - 1 / rounds) / (1 / self._share - 1 / rounds)) if rounds > 0 else 0.0
        own_value = second.own.value
        mixed = torch.lerp(second.shared.value, own_value, part)
        second.used = torch.minimum(mixed, own_value)

    @torch.no_grad()
    def end(self, motions: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
        """Continue with the state that follows from a round.

        ``motions`` has, for each parameter, the mean motion D of the round, and where it started.
        """
        for number, group, parameter, state in self._states():
            start, response = self._start.get(parameter), self._responses[number]
            if start is None or parameter not in motions or response.of_gradient <= 0:
                continue
            motion, origin = (each.to(parameter) for each in motions[parameter])
            if group.get("decoupled_weight_decay"):
                motion = torch.add(motion, origin, alpha=response.rates * group["weight_decay"])
            beta, weight, second = _decay(group), 1.0, self._second.get(parameter)
            if second is not None:
                motion, weight = motion * second.used.sqrt().add_(group["eps"]), 1 - beta
            gradient = torch.add(motion, start, alpha=response.of_start)
            gradient.mul_(-1 / response.of_gradient)
            momentum = _momentum(group, state)
            assert momentum is not None
            momentum.copy_(start).mul_(beta**response.steps)
            momentum.add_(gradient, alpha=weight * _geometric(beta, response.steps))
            if second is not None:
                second.shared.add(gradient.square_(), group["betas"][1] ** response.steps)

    # -- during an interval --------------------------------------------------------------------

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        steps = [0] * len(optimizer.param_groups)
        for number, group, parameter, state in self._states():
            steps[number] = max(steps[number], int(state.get("step", 0)))
            second = self._second.get(parameter)
            if second is not None and parameter.grad is not None:
                self._use(second, parameter.grad, state, group["betas"][1])
        for number, group in enumerate(optimizer.param_groups):
            _respond(self._responses[number], group, steps[number])

    def _use(self, second: _Second, gradient: Tensor, state: _State, beta: float) -> None:
        """Set ``exp_avg_sq`` so that the optimizer's own next value of it is the v of the round."""
        squared = gradient.square()
        second.own.add(squared, beta)
        # The noise of the whole batch alone is as much. A first gradient may be far larger than
        # anything that the round started with.
        used = torch.maximum(second.used, second.own.value.mul_(self._share))
        used.mul_(1 - beta ** (int(state["step"]) + 1)).sub_(squared.mul_(1 - beta)).div_(beta)
        state["exp_avg_sq"].copy_(used)

    def _states(self) -> Iterator[tuple[int, dict[str, Any], Tensor, _State]]:
        """Yield the group, with its number, and the state of each parameter that made a step."""
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if state := self._optimizer.state.get(parameter):
                    yield number, group, parameter, state


def _respond(response: _Response, group: dict[str, Any], steps: int) -> None:
    """Count one more step of an interval, after ``steps`` of the optimizer."""
    rate, beta = float(group["lr"]), _decay(group)
    response.steps += 1
    response.rates += rate
    decay, total = beta**response.steps, _geometric(beta, response.steps)
    if "betas" in group:
        rate, total = rate / (1 - beta ** (steps + 1)), (1 - beta) * total
    elif group.get("nesterov"):
        decay, total = beta * decay, 1 + beta * total
    response.of_start += rate * decay
    response.of_gradient += rate * total


def _decay(group: dict[str, Any]) -> float:
    """Return the factor by which a step of the optimizer decays its momentum."""
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def _geometric(beta: float, terms: int) -> float:
    """Return the sum of the first powers of β, from 1 on."""
    return float(terms) if beta == 1 else (1 - beta**terms) / (1 - beta)


def _momentum(group: dict[str, Any], state: _State) -> Tensor | None:
    if _is_adam(group, state):
        momentum: Tensor = state["exp_avg"]
        return momentum
    return state.get("momentum_buffer") if group.get("momentum") else None


def _is_adam(group: dict[str, Any], state: _State) -> bool:
    return "betas" in group and "exp_avg_sq" in state and not group.get("amsgrad")
