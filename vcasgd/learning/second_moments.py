"""Second moments of Adam that a new worker takes over, so that its first steps are not noise.

An optimizer divides by the root of its second moments, which are a mean over about a thousand
gradients. A new one has seen few, so it overestimates some steps and misses what was large before.
Its first moments start at zero: with old second moments, its steps then grow within ten steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from vcasgd.learning.optimizers import trained_by

#: Numbers that are divided at a time.
PIECE = 1 << 22
#: Largest second moment that is taken over; larger ones would overflow.
LARGEST = 1e30


def count(optimizer: Optimizer) -> int:
    """Return how many second moments the optimizer has; 0 if they can't be taken over.

    Only Adam and AdamW without options that add other state can take them over, and only if this
    process has all of them.
    """
    parameters = trained_by(optimizer)
    if (
        type(optimizer) not in (Adam, AdamW)
        or any(group["amsgrad"] for group in optimizer.param_groups)
        or any(hasattr(each, "to_local") or each.is_complex() for each in parameters)
    ):
        return 0
    return sum(each.numel() for each in parameters)


def steps(optimizer: Optimizer) -> int:
    """Return the number of steps of the optimizer; 0 if it is new."""
    states = (optimizer.state.get(each) for each in trained_by(optimizer))
    return max((int(state["step"]) for state in states if state), default=0)


def read(optimizer: Optimizer, out: Tensor) -> None:
    """Copy the second moments, corrected for their bias, into ``out`` [:func:`count`].

    It can have any floating-point type. Those of a parameter that never had a gradient are 0.
    """
    at = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part = out[at : at + parameter.numel()]
            at += parameter.numel()
            if state := optimizer.state.get(parameter):
                unbias = 1 - group["betas"][1] ** int(state["step"])
                second = state["exp_avg_sq"].detach().flatten()
                # Rounded after the division, in pieces that bound the memory for it.
                for target, piece in zip(
                    torch.split(part, PIECE), torch.split(second, PIECE), strict=True
                ):
                    target.copy_(piece / unbias)
            else:
                part.zero_()


def adopt(optimizer: Optimizer, moments: Tensor, made: int) -> bool:
    """Give a new optimizer the second moments of one that made ``made`` steps.

    ``moments`` is float32 [:func:`count`], bias-corrected. Returns False, and changes nothing, if
    one of them is not a number that a second moment can be.
    """
    low, high = torch.aminmax(moments)
    if not (float(low) >= 0 and float(high) <= LARGEST):  # NaN fails as well
        return False
    at = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part = moments[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
            if not part.any():
                continue
            second = part.to(parameter) * (1 - group["betas"][1] ** made)
            optimizer.state[parameter] = {
                "step": _counter(made, group, parameter),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.empty_like(parameter).copy_(second),
            }
    return True


def _counter(made: int, group: dict[str, Any], parameter: Tensor) -> Tensor:
    """Return the counter of steps where Adam keeps it (``torch.optim.Adam._init_group``)."""
    on_device = group["capturable"] or group["fused"]
    return torch.tensor(
        float(made), dtype=torch.float32, device=parameter.device if on_device else "cpu"
    )
