"""Hooks that change gradients, repeated on the mean gradient of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import vcasgd
from vcasgd.learning.optimizers import parts_of


def are_hooked(parameters: Iterable[Tensor]) -> bool:
    """Return True if some of these have hooks of :meth:`torch.Tensor.register_hook`."""
    return any(each._backward_hooks for each in parameters)


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks of :meth:`torch.optim.Optimizer.register_step_pre_hook`, apart from ours."""
    found: list[Callable[..., Any]] = []
    for part in parts_of(optimizer):
        hooks: Any = part._optimizer_step_pre_hooks
        found += (each for each in hooks.values() if not _is_ours(each))
    return found


def repeat_with_mean(hook: Any) -> None:
    """Let a function of ours, which calls code of the user's before a step, count as its hook."""
    hook.repeats = True


def _is_ours(hook: Any) -> bool:
    own = str(getattr(hook, "__module__", "")).partition(".")[0] == vcasgd.__name__
    return own and not getattr(hook, "repeats", False)


class GradientHooks:
    """Notes the gradients of parameters before and after their hooks, until :meth:`close`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own: dict[Tensor, list[Any]] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._after: dict[Tensor, Tensor] = {}
        #: Factor of the gradients that the hooks got last.
        self._scale = 1.0
        for each in parameters:
            if not are_hooked([each]):
                continue
            hooks: Any = each._backward_hooks
            present = dict(hooks)
            register: Any = each.register_hook
            # torch calls them in the order in which they are added, and knows no other one.
            hooks.clear()
            first = register(partial(self._note, self._before, each))
            hooks.update(present)
            last = register(partial(self._note, self._after, each))
            self._own[each] = [first, last]

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for handles in self._own.values():
            for handle in handles:
                handle.remove()

    def take(
        self, gradients: dict[Tensor, Tensor], scale: Callable[[], float]
    ) -> dict[Tensor, Tensor]:
        """Return those before the hooks of parameters with these ``gradients`` in a step.

        Hooks get gradients times ``scale()``. Others aren't what they left in the last call of
        ``backward``.
        """
        found = {}
        for each in gradients.keys() & self._own.keys():
            before, after = self._before.pop(each, None), self._after.pop(each, None)
            if before is None or after is None or after.is_sparse:
                continue
            self._scale = scale()
            if torch.allclose(after / self._scale, gradients[each], rtol=1e-6, atol=0):
                found[each] = before / self._scale
        return found

    def repeat(self, parameters: Iterable[Tensor]) -> None:
        """Call the hooks of parameters with the gradients that these have now."""
        for each in parameters:
            hooks: Any = each._backward_hooks
            own = {handle.id for handle in self._own[each]}
            for hook in [hook for number, hook in hooks.items() if number not in own]:
                if each.grad is not None:
                    scaled = each.grad * self._scale
                    changed = hook(scaled)
                    each.grad = (scaled if changed is None else changed) / self._scale

    @staticmethod
    def _note(notes: dict[Tensor, Tensor], parameter: Tensor, gradient: Tensor) -> None:
        notes[parameter] = gradient.detach().clone()
