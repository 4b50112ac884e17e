"""Machines that are processes of this computer: for development, for tests, and for demos
that need no cloud. They boot, get notices and vanish as spot instances do.

Under ``home``::

    instances/<id>/        one directory for each machine, see ``local_directory``
    pools/<pool>.json      optional; overrides fields of the pool while it is there
    stack.lock             held by whoever owns the machines, see ``local_instance.Owner``
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from vcasgd.errors import FleetError, InvalidRequest, NoCapacity, SpecError
from vcasgd.fleet.providers.base import Boot, Instance, InstanceState, Offer, narrowed
from vcasgd.fleet.providers.local.directory import (
    UNFINISHED,
    InstanceDirectory,
    LaunchRequest,
    read_json,
    write_json,
)
from vcasgd.fleet.providers.local.spawn import spawn

#: how long machines outlive the stack that owns them: enough to restart it after a crash
OWNER_GRACE_SECONDS = 20.0
#: so many dead machines keep their logs
KEPT_DEAD = 20
#: writing the directories of a launch takes milliseconds, sweeping dead machines a second; on a
#: machine that is busy with other things, many times that
LOCK_LIMIT_SECONDS = 60.0
LOCK_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class LocalPool:
    """How many machines this computer plays, and at what prices (USD per hour)."""

    name: str
    capacity: int
    price_per_hour: float = 0.0
    on_demand_price_per_hour: float = 0.0
    boot_seconds: float = 0.0
    notice_seconds: float = 5.0
    spot: bool = True
    zones: tuple[str, ...] = ("local",)
    instance_types: tuple[str, ...] = ("process",)
    cpus: float = 1.0
    gpus: int = 0

    def price(self, *, spot: bool) -> float:
        return self.price_per_hour if spot else self.on_demand_price_per_hour

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise SpecError(f"{self.name!r} is not a name of a pool", field="pools")


@dataclass(frozen=True)
class _Wanted:
    """What a launch asks for, within the pool."""

    zones: tuple[str, ...]
    instance_type: str
    spot: bool


class LocalProvider:
    """The contract of :class:`~vcasgd.fleet.providers.base.Provider` for one local pool.

    ``owner_grace_seconds``: how long machines outlive the holder of ``home/stack.lock``;
    ``None``: they need none.
    """

    name = "local"

    def __init__(
        self,
        home: Path,
        cluster: str,
        pool: LocalPool,
        *,
        owner_grace_seconds: float | None = OWNER_GRACE_SECONDS,
    ) -> None:
        self._home = home.resolve()
        self._instances = self._home / "instances"
        self._cluster = cluster
        self._configured = pool
        self._owner_grace = owner_grace_seconds

    @property
    def pool(self) -> LocalPool:
        """As it is now. Raises :class:`FleetError` if the override can't be used."""
        override = read_json(self._override) or {}
        if not all(isinstance(value, int | float) for value in override.values()):
            raise FleetError(f"{self._override}: values must be numbers")
        try:
            return replace(self._configured, **override)
        except TypeError as error:
            raise FleetError(f"{self._override}: {error}") from error

    def override(self, **fields: float) -> None:
        """Changes fields of the pool for everybody until it is called again, e.g. ``capacity=0``.

        Machines that run already stay as they are.
        """
        self._override.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._override, fields)

    def offers(self, pool: str) -> list[Offer]:
        """See the contract. A machine has as many processors as the pool says."""
        self._check(pool)
        now, there = self.pool, time.time()
        return [
            Offer(
                pool=now.name,
                zone=zone,
                instance_type=kind,
                spot=now.spot,
                price_per_hour=now.price(spot=now.spot),
                on_demand_price_per_hour=now.on_demand_price_per_hour,
                cpus=now.cpus,
                gpus=now.gpus,
                as_of=there,
                source="settings of the pool",
            )
            for zone in now.zones
            for kind in now.instance_types
        ]

    def launch(
        self,
        pool: str,
        count: int,
        boot: Boot,
        token: str,
        *,
        zones: Sequence[str] | None = None,
        instance_types: Sequence[str] | None = None,
        spot: bool | None = None,
    ) -> list[str]:
        """See the contract. A token is known as long as a directory of its machines is kept.

        The machines of a launch are spread over the zones in turn.
        """
        self._check(pool)
        now = self.pool
        wanted = _Wanted(
            zones=narrowed(now.zones, zones, pool, "zone"),
            instance_type=narrowed(now.instance_types, instance_types, pool, "instance type")[0],
            spot=now.spot if spot is None else spot,
        )
        with self._exclusive():
            directories = self._create(count, boot, token, wanted)
        spawn([directory for directory in directories if not _started(directory)])
        return [directory.id for directory in directories]

    def capacity(self, pool: str) -> int | None:
        """See the contract; here it is known."""
        return self.pool.capacity if pool == self._configured.name else 0

    def instances(self) -> list[Instance]:
        """See the contract. What a dead machine left behind is swept away in passing."""
        now = time.time()
        alive = []
        for directory in self._unburied():
            with contextlib.suppress(FleetError):  # removed by another process meanwhile
                instance = directory.instance(now)
                if instance.state is InstanceState.GONE:
                    self._end(directory, directory.verdict(now) or "gone")
                else:
                    alive.append(instance)
        return alive

    def evict(self, instance_id: str, notice_seconds: float | None = None) -> None:
        """See the contract. The machine hears of it within about 0.1 s."""
        notice = self.pool.notice_seconds if notice_seconds is None else notice_seconds
        if (directory := self._find(instance_id)) is not None:
            directory.notify(time.time() + notice)

    def boot_error(self, instance_id: str) -> str | None:  # noqa: ARG002
        """See the contract: what a process says is in its log."""
        return None

    def terminate(self, instance_id: str) -> None:
        """See the contract. Mostly nothing is alive any more when it returns."""
        self._take(instance_id, "terminated")

    def kill(self, instance_id: str) -> None:
        """See the contract. Mostly nothing is alive any more when it returns."""
        self._take(instance_id, "killed")

    def destroy_all(self) -> None:
        """Ends all machines of the pool. Raises :class:`FleetError` if some can't be killed."""
        condemned = list(self._unburied())
        for directory in condemned:
            directory.condemn("destroyed")
        surviving = [directory.id for directory in condemned if not directory.bury()]
        if surviving:
            raise FleetError(f"can't be killed: {', '.join(surviving)}")

    def close(self) -> None:
        """Nothing is held."""

    @property
    def _override(self) -> Path:
        return self._home / "pools" / f"{self._configured.name}.json"

    def _check(self, pool: str) -> None:
        if pool != self._configured.name:
            raise InvalidRequest(
                f"there is no pool {pool!r}", remedy=f"known: {self._configured.name}", pool=pool
            )

    def _create(
        self, count: int, boot: Boot, token: str, wanted: _Wanted
    ) -> list[InstanceDirectory]:
        """One directory for each machine that is granted, or those of the first time."""
        self._remove_unfinished()
        pool, now = self.pool, time.time()
        launch = LaunchRequest(
            id="",
            cluster=self._cluster,
            pool=pool.name,
            token=token,
            count=self._granted(count, token),
            launched_at=now,
            price_per_hour=pool.price(spot=wanted.spot),
            boot_seconds=pool.boot_seconds,
            owner_grace_seconds=self._owner_grace,
            spot=wanted.spot,
            instance_type=wanted.instance_type,
            on_demand_price_per_hour=pool.on_demand_price_per_hour,
        )
        return [
            self._ensure(
                replace(
                    launch,
                    id=self._id(token, index),
                    zone=wanted.zones[index % len(wanted.zones)],
                ),
                boot,
            )
            for index in range(launch.count)
        ]

    def _ensure(self, launch: LaunchRequest, boot: Boot) -> InstanceDirectory:
        with contextlib.suppress(FileExistsError):
            return InstanceDirectory.create(self._instances, launch, boot)
        return InstanceDirectory(self._instances / launch.id)

    def _granted(self, count: int, token: str) -> int:
        first = InstanceDirectory(self._instances / self._id(token, 0))
        if first.path.exists():
            return first.launch().count
        occupied = [one for one in self.instances() if one.state is not InstanceState.LEAVING]
        capacity = self.pool.capacity
        if capacity <= len(occupied):
            raise NoCapacity(
                f"{self.pool.name}: {len(occupied)} of {capacity} machines in use",
                pool=self.pool.name,
            )
        return min(count, capacity - len(occupied))

    def _id(self, token: str, index: int) -> str:
        # the home is in it because the marker of a process must not mean a machine of another
        key = "\0".join([str(self._home), self._cluster, self._configured.name, token, str(index)])
        return f"{self._configured.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One launch at a time; the lock ends with its holder. Raises :class:`FleetError`."""
        self._instances.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._instances / ".lock").open("wb") as lock:
            deadline = time.monotonic() + LOCK_LIMIT_SECONDS
            while not _locked(lock):
                if time.monotonic() > deadline:
                    raise FleetError(f"{self._instances}: another launch does not end")
                time.sleep(LOCK_POLL_SECONDS)
            yield

    def _remove_unfinished(self) -> None:
        for path in self._instances.glob(f"{UNFINISHED}*"):
            InstanceDirectory(path).remove()

    def _directories(self) -> Iterator[InstanceDirectory]:
        for path in sorted(self._instances.glob(f"{self._configured.name}-*")):
            with contextlib.suppress(FleetError):
                directory = InstanceDirectory(path)
                launch = directory.launch()
                if (launch.cluster, launch.pool) == (self._cluster, self._configured.name):
                    yield directory

    def _unburied(self) -> Iterator[InstanceDirectory]:
        return (directory for directory in self._directories() if not directory.buried())

    def _find(self, instance_id: str) -> InstanceDirectory | None:
        return next((one for one in self._unburied() if one.id == instance_id), None)

    def _take(self, instance_id: str, reason: str) -> None:
        if (directory := self._find(instance_id)) is not None:
            self._end(directory, reason)

    def _end(self, directory: InstanceDirectory, reason: str) -> None:
        directory.condemn(reason)
        if directory.bury():
            self._forget_old()

    def _forget_old(self) -> None:
        with contextlib.suppress(FleetError):  # another process tidies up as well
            dead = [one for one in self._directories() if one.buried()]
            dead.sort(key=lambda one: one.launch().launched_at)
            for directory in dead[:-KEPT_DEAD]:
                directory.remove()


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _started(directory: InstanceDirectory) -> bool:
    return directory.condemned() or directory.machine() is not None
