"""Provider of machines that join by themselves: it lists them and asks them to leave."""

from __future__ import annotations

import time
from typing import Any, Protocol

from vcasgd.errors import NoCapacity
from vcasgd.fleet.providers.base import Machine, Offer

#: Seconds that a machine has after an eviction without a time.
NOTICE_SECONDS = 30.0


class JoinedFleet(Protocol):
    """Machines that joined. Calls raise :class:`~vcasgd.errors.CloudUnavailable`."""

    def machines(self) -> list[Machine]:
        """Return the machines that are present and that no provider ordered."""
        ...

    def leaving(self) -> dict[str, float]:
        """Return when each ordered machine that leaves said so, in Unix seconds."""
        ...

    def end(self, machine_id: str, reason: str, seconds: float | None = None) -> None:
        """Tell a machine to leave, within ``seconds`` or a usual time."""
        ...

    def remove(self, machine_id: str) -> None:
        """Remove a machine at once."""
        ...


class NothingJoined:
    """For processes that don't know the ledger: they see no machines."""

    def machines(self) -> list[Machine]:
        """Return nothing."""
        return []

    def leaving(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def end(self, machine_id: str, reason: str, seconds: float | None = None) -> None:
        """Do nothing."""

    def remove(self, machine_id: str) -> None:
        """Do nothing."""


class JoinProvider:
    """Implementation of :class:`~vcasgd.fleet.providers.base.Provider` for pools that buy nothing.

    Machines appear when they join, and vanish when they leave or stop reporting.
    """

    name = "join"
    max_terminated = 100

    def __init__(self, joined: JoinedFleet) -> None:
        self._joined = joined

    def offers(self, pool: str) -> list[Offer]:
        """Return nothing, because nothing is for sale."""
        return []

    def launch(self, pool: str, *_: Any, **__: Any) -> list[str]:
        """Raise :class:`~vcasgd.errors.NoCapacity`."""
        raise NoCapacity(f"machines of pool {pool} join by themselves", pool=pool)

    def capacity(self, pool: str) -> int | None:
        """Return None: any number can join."""
        return None

    def machines(self) -> list[Machine]:
        """See the contract."""
        return self._joined.machines()

    def boot_error(self, machine_id: str) -> str | None:
        """Return None: a machine that doesn't boot doesn't join."""
        return None

    def terminate(self, *machine_ids: str) -> None:
        """Tell machines to leave. They may join again."""
        for one in machine_ids:
            self._joined.end(one, "the stack doesn't need this machine any more")

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:
        """See the contract."""
        seconds = NOTICE_SECONDS if notice_seconds is None else notice_seconds
        self._joined.end(machine_id, f"evicted at {time.strftime('%H:%M:%S')}", seconds)

    def kill(self, machine_id: str) -> None:
        """Remove a machine. Its agent kills the workers when it reports the next time."""
        self._joined.remove(machine_id)

    def close(self) -> None:
        """Do nothing."""
