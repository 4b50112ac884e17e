"""Scopes, names, and limits of API tokens."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from vcasgd.spec.values import Duration, described

#: Name of the token that the stack has from its start. No other token can have it.
BOOTSTRAP = "bootstrap"
#: Name of the token of the processes that export jobs to trackers.
TRACKERS = "trackers"
#: Pattern of the name of a token, and so of a user. The text of a token contains it.
NAME_PATTERN = described(
    r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$",
    "up to 40 lowercase letters and digits, and dashes between them",
)
#: Pattern of the name of a pool. It is used in tags, in labels, and in ids of machines.
POOL_PATTERN = described(
    r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$",
    "up to 40 lowercase letters, digits, and dashes; first a letter, and no dash at the end",
)
#: Largest limit of machines; far above any fleet.
MAX_MACHINES = 1_000_000
#: Longest lifetime of a token; a longer one is a typing error.
MAX_LIFETIME = timedelta(days=3650)


class Scope(StrEnum):
    """Permission of a token. Each scope but ``join`` includes those before it."""

    READ = "read"
    """Read everything but the tokens."""
    SUBMIT = "submit"
    """Submit jobs, and control and delete its own."""
    ADMIN = "admin"
    """Everything: jobs of all users, machines, tokens."""
    JOIN = "join"
    """Join with machines, and nothing else."""

    def includes(self, other: Scope) -> bool:
        """Return True if this scope permits what ``other`` does."""
        if Scope.JOIN in (self, other):
            return self is other
        order = list(Scope)
        return order.index(self) >= order.index(other)


def _not_reserved(name: str) -> str:
    if name in (BOOTSTRAP, TRACKERS):
        raise ValueError(f"{name} is the name of a token of the stack; choose another name")
    return name


def _not_too_long(lifetime: timedelta) -> timedelta:
    if lifetime > MAX_LIFETIME:
        raise ValueError(f"must be at most {MAX_LIFETIME.days}d")
    return lifetime


TokenName = Annotated[str, Field(pattern=NAME_PATTERN), AfterValidator(_not_reserved)]
Lifetime = Annotated[Duration, AfterValidator(_not_too_long)]
PoolName = Annotated[str, Field(pattern=POOL_PATTERN)]
MonthlyBudget = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MachineLimit = Annotated[int, Field(ge=1, le=MAX_MACHINES)]
