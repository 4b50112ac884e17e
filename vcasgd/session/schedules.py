"""Learning rates of torch's schedulers as factors over the progress of a job."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from vcasgd.errors import SpecError


def factors(scheduler: LRScheduler, steps: int) -> tuple[float, ...]:
    """Return the factor of the first group's learning rate at each of a scheduler's steps.

    The scheduler and its optimizer stay as they are. Raises :class:`SpecError` for a scheduler that
    follows a metric.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise SpecError(
            "task: ReduceLROnPlateau can't be used: a step must have the same rate on any worker",
            remedy="use a scheduler whose rate depends on the step only",
            field="task",
        )
    groups = scheduler.optimizer.param_groups
    options = [
        {name: value for name, value in group.items() if name != "params"} for group in groups
    ]
    state = copy.deepcopy(scheduler.state_dict())
    rates = []
    with warnings.catch_warnings():
        # torch expects a step of the optimizer first.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            rates.append(groups[0]["lr"] / groups[0]["initial_lr"])
            scheduler.step()
    scheduler.load_state_dict(state)
    for group, values in zip(groups, options, strict=True):
        group.update(values)
    return tuple(rates)


def schedule_of(
    schedule: Callable[[float], float] | LRScheduler | None, steps: int | None
) -> Callable[[float], float] | None:
    """Return the factor of the learning rates as a function of the progress in [0, 1).

    Raises :class:`SpecError` for a scheduler without its number of steps.
    """
    if not isinstance(schedule, LRScheduler):
        return schedule
    if not steps:
        raise SpecError(
            "task: the session needs the number of its scheduler's steps",
            remedy="pass schedule_steps, all steps that the scheduler makes",
            field="task",
        )
    sampled = factors(schedule, steps)
    return lambda progress: sampled[int(progress * len(sampled))]


def start_rates(optimizer: Optimizer) -> None:
    """Set the learning rates to those before a scheduler changed them."""
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            group["lr"] = group["initial_lr"]
