"""What every provider of machines promises, whatever cloud is behind it.

The truth about a fleet lies with the cloud, never in the memory of a process: a provider
constructed anew in another process sees the same instances, by their cluster tag. Every
call returns soon and may be repeated; what takes long shows in :meth:`Provider.instances`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

#: stands for the instance's id in a :class:`Boot`; nobody knows the id before the launch
INSTANCE_ID = "{instance_id}"


class InstanceState(StrEnum):
    """``LEAVING`` has a notice of eviction and still runs; ``GONE`` never comes back."""

    BOOTING = "booting"
    RUNNING = "running"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(frozen=True)
class Instance:
    """A machine as its cloud sees it. Times are Unix seconds, prices USD per hour."""

    id: str
    pool: str
    state: InstanceState
    launched_at: float
    notice_at: float | None
    """When it will be taken; ``None`` without a notice."""
    host: str
    price_per_hour: float
    spot: bool


@dataclass(frozen=True)
class Boot:
    """What a machine runs once it is up; its end is the end of the machine.

    The words ``{instance_id}`` in an argument or a value are replaced by the instance's id.
    Values of ``env`` may be passwords, so they are not shown.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict, repr=False)

    def on(self, instance_id: str) -> Boot:
        """The same with the placeholder filled in."""
        return Boot(
            tuple(argument.replace(INSTANCE_ID, instance_id) for argument in self.argv),
            {name: value.replace(INSTANCE_ID, instance_id) for name, value in self.env.items()},
        )

    def __repr__(self) -> str:
        return f"Boot(argv={self.argv!r}, env={{{', '.join(f'{name}=…' for name in self.env)}}})"


class Provider(Protocol):
    """A place that machines come from. All methods may be called from several processes.

    Any method raises :class:`~vcasgd.errors.FleetError` when the cloud can't be reached or
    refuses; the caller tries again later, with the same arguments.
    """

    @property
    def name(self) -> str:
        """``local``, ``aws`` or ``gcp``."""
        ...

    def launch(self, pool: str, count: int, boot: Boot, token: str) -> list[str]:
        """Asks for up to ``count`` machines; the ids of those that the pool gives, at least one.

        Idempotent by ``token`` (at most 64 characters): the same token again, with whatever
        count, starts nothing new and returns the ids of the first time, even if some of
        these machines are gone by now. Returns soon: the machines are ``BOOTING``, and may
        not yet be in :meth:`instances`, so the caller remembers the ids until they are.

        Raises :class:`~vcasgd.errors.NoCapacity` when the pool gives none; then nothing was
        launched.
        """
        ...

    def capacity(self, pool: str) -> int | None:
        """How many machines the pool has at most; ``None`` where only a launch can tell."""
        ...

    def instances(self) -> list[Instance]:
        """All machines with the cluster's tag in this provider's pools that are not ``GONE``.

        A machine launched some seconds ago may not be listed yet; one that has died may be
        listed for some seconds more.
        """
        ...

    def terminate(self, instance_id: str) -> None:
        """Ends a machine that is no longer wanted. Idempotent; silent if there is none.

        Returns soon; the machine may be listed a while longer.
        """
        ...

    def evict(self, instance_id: str, notice_seconds: float | None = None) -> None:
        """Gives a real notice, as the cloud would, and takes the machine when it has passed.

        ``None`` is the notice that is usual there. The first notice stands; silent if there
        is no such machine. Raises :class:`~vcasgd.errors.FleetError` where the cloud offers
        no way to do it.
        """
        ...

    def kill(self, instance_id: str) -> None:
        """Takes a machine with no notice at all. Idempotent; silent if there is none."""
        ...

    def close(self) -> None:
        """Releases connections. The machines stay."""
        ...
