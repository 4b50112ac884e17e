"""Limits of an account for a pool, as a cloud reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AccountQuota:
    """A quota that limits a pool's vCPUs.

    ``least``: vCPUs of the pool's smallest machine. ``used`` is 0 if the cloud doesn't report it.
    """

    name: str
    limit: float
    least: float
    used: float = 0.0
    remedy: str = ""

    @property
    def suffices(self) -> bool:
        """True if there is room for one machine."""
        return self.limit - self.used >= self.least


@dataclass(frozen=True)
class AccountAnswer:
    """Answer of a cloud. ``denied`` says which permission lacks, if one does."""

    denied: str | None = None
    quotas: tuple[AccountQuota, ...] = ()
