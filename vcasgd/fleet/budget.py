"""When a job has to be paused so that it never costs more than it may."""

from __future__ import annotations

from collections.abc import Iterable

from vcasgd.fleet.observed import Limits
from vcasgd.fleet.providers.base import Instance

#: what a job that is paused for its budget names first
FIELD = "stop.max_cost_usd"


def commitment(machines: Iterable[Instance], limits: Limits, now: float) -> float:
    """USD that machines still cost if they are given up at ``now`` (Unix seconds): until their
    workers have left and they are gone, and at least what a cloud charges for a machine."""
    return sum(
        one.price_per_hour
        * max(limits.exit_seconds, limits.billing_seconds - (now - one.launched_at))
        / 3600
        for one in machines
    )


def affordable(budget: float | None, spent: float, committed: float) -> float | None:
    """USD that may still be promised; ``None`` without a budget."""
    return None if budget is None else max(0.0, budget - spent - committed)


def pause_reason(
    budget: float | None,
    spent: float,
    committed: float,
    purpose: str = "spent until its machines are gone",
) -> str | None:
    """Why the job has to rest now; ``None``: it may go on until the next look."""
    if budget is None or spent + committed < budget:
        return None
    return (
        f"{FIELD}: {spent:.4f} of {budget:g} USD are spent, and {committed:.4f} more would be "
        f"{purpose}; to go on, resume it with a larger budget"
    )
