"""Provider whose machines are processes on this computer.

It serves development, tests, and demos without a cloud. Machines boot, receive notices, and vanish
as spot machines do. Files under ``home``::

    machines/<id>/        one directory for each machine; see ``local/directory.py``
    pools/<pool>.json      optional: overrides fields of the pool while it exists
    stack.lock             held by the owner of the machines; see ``local/machine.py``
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from vcasgd.errors import FleetError, NoCapacity
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.prices import ListPrice
from vcasgd.fleet.providers.base import Boot, LaunchOrder, Provider, offer_of
from vcasgd.fleet.providers.local.directory import (
    UNFINISHED,
    LaunchRequest,
    MachineDirectory,
    read_json,
    write_json,
)
from vcasgd.fleet.providers.local.processes import Process, processes_of
from vcasgd.fleet.providers.local.spawn import Spawner
from vcasgd.gpus import VISIBLE
from vcasgd.local_files import hold_lock
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.spec.hardware import Hardware
from vcasgd.spec.problems import spec_error

#: Seconds that machines outlive the stack that owns them; enough to restart it after a crash.
OWNER_GRACE_SECONDS = 20.0
#: Seconds of a notice whose length isn't given.
NOTICE_SECONDS = 5.0
#: Number of dead machines whose logs are kept.
KEPT_DEAD = 20
#: Seconds to wait for another launch. Writing its directories takes milliseconds and removing
#: dead machines a second, but many times that on a busy machine.
LOCK_LIMIT_SECONDS = 60.0
#: Seconds without machines after which the process that they are forks of ends.
TEMPLATE_SECONDS = 60.0


class LocalProvider(Provider[LocalPoolSpec]):
    """Provider for one local pool, whose number of machines is ``max_machines``.

    The machines take turns over ``devices``, GPUs of this computer as in ``CUDA_VISIBLE_DEVICES``;
    without any, each sees all.

    ``owner_grace_seconds`` is how long machines outlive the holder of ``home/stack.lock``; None
    means that they need no owner.
    """

    name = "local"
    max_terminated = 10

    def __init__(
        self,
        home: Path,
        cluster: str,
        pool: LocalPoolSpec,
        *,
        devices: Sequence[str] = (),
        owner_grace_seconds: float | None = OWNER_GRACE_SECONDS,
    ) -> None:
        self._home = home.resolve()
        self._machines = self._home / "machines"
        super().__init__(cluster, [pool])
        self._configured = pool
        self.devices = devices
        self._owner_grace = owner_grace_seconds
        self._spawner = Spawner()
        self._used_at = time.monotonic()

    @property
    def pool(self) -> LocalPoolSpec:
        """Current pool, with overrides. Raises :class:`FleetError` if the override is invalid."""
        override = read_json(self._override)
        if not override:
            return self._configured
        capacity = override.pop("capacity", self._configured.max_machines)
        template = self._configured.template.model_dump() | override
        fields = {"max_machines": capacity, "template": template}
        try:
            changed = LocalPoolSpec(name=self._configured.name, provider="local", **fields)
        except ValidationError as error:
            why = spec_error(error, LocalPoolSpec).message
            raise FleetError(f"{self._override}: {why}") from error
        known = {"max_machines": changed.max_machines, "template": changed.template}
        return self._configured.model_copy(update=known)

    def override(self, **fields: float) -> None:
        """Override ``capacity``, for example with 0, or fields of the pool's template.

        All processes see that.
        The override lasts until the next call. Running machines don't change.
        """
        self._override.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._override, fields)

    def _offer(self, spec: LocalPoolSpec, zone: str, kind: str) -> Offer:
        on_demand, source = _price(spec, spot=False), "settings of the pool"
        listed = ListPrice(on_demand, None, Hardware(1.0), time.time(), source)
        return offer_of(spec, zone, kind, _price(spec, spot=spec.spot), listed)

    def _launch(self, order: LaunchOrder[LocalPoolSpec]) -> list[str]:
        """See the contract. A token is valid while a directory of its machines is kept.

        The machines of a launch are spread over the zones in turn.
        """
        with self._exclusive():
            directories = self._create(order)
        self._used_at = time.monotonic()
        new = [each for each in directories if not (each.marked_terminated() or each.running())]
        self._spawner.spawn(new, order.boot)
        return [directory.id for directory in directories]

    def capacity(self, pool: str) -> int | None:
        return self.pool.max_machines if pool == self._configured.name else 0

    def machines(self) -> list[Machine]:
        """See the contract. Also cleans up after dead machines."""
        now = time.time()
        alive = []
        for directory in self._unreaped():
            with contextlib.suppress(FleetError):  # Removed by another process in the meantime.
                machine = directory.machine(now)
                if machine.state is MachineState.GONE:
                    self._end(directory, directory.gone_reason(now) or "gone")
                else:
                    alive.append(machine)
        if alive:
            self._used_at = time.monotonic()
        elif time.monotonic() - self._used_at > TEMPLATE_SECONDS:
            self._spawner.close()
        return alive

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:
        """See the contract. The machine receives the notice within about 0.1 s."""
        known = (notice_seconds, self.pool.template.notice_seconds, NOTICE_SECONDS)
        notice = next(seconds for seconds in known if seconds is not None)
        if (directory := self._find(machine_id)) is not None:
            directory.notify(notice)

    def terminate(self, *machine_ids: str) -> None:
        """See the contract. Usually nothing is alive when it returns."""
        for directory in filter(None, map(self._find, machine_ids)):
            self._end(directory, "terminated")

    def processes(self, machine_id: str) -> set[Process]:
        """Return all living processes of a machine, also of one that has ended."""
        found = (one.running() for one in self._directories() if one.id == machine_id)
        machine = next(found, None)
        return processes_of(machine_id, machine.process if machine else None)

    def destroy_all(self) -> None:
        """End all machines of the pool. Raises :class:`FleetError` if some can't be killed."""
        directories = list(self._unreaped())
        for directory in directories:
            directory.mark_terminated("destroyed")
        surviving = [directory.id for directory in directories if not directory.reap()]
        if surviving:
            raise FleetError(f"these machines can't be killed: {', '.join(surviving)}")

    def close(self) -> None:
        """See the contract. Machines that run are not affected."""
        self._spawner.close()

    @property
    def _override(self) -> Path:
        return self._home / "pools" / f"{self._configured.name}.json"

    def _pool(self, name: str) -> LocalPoolSpec:
        super()._pool(name)
        return self.pool

    def _create(self, order: LaunchOrder[LocalPoolSpec]) -> list[MachineDirectory]:
        """Return one directory for each granted machine, or those of the first launch."""
        for path in self._machines.glob(f"{UNFINISHED}*"):
            MachineDirectory(path).remove()
        pool = order.spec
        launch = LaunchRequest(
            id="",
            cluster=self._cluster,
            pool=pool.name,
            token=order.token,
            count=self._granted(order.count, order.token),
            launched_at=time.time(),
            price_per_hour=_price(pool, spot=order.spot),
            boot_seconds=pool.template.boot_seconds or 0.0,
            owner_grace_seconds=self._owner_grace,
            spot=order.spot,
            machine_type=order.machine_types[0],
            on_demand_price_per_hour=_price(pool, spot=False),
        )
        return [
            self._ensure(
                replace(
                    launch,
                    id=self._id(order.token, index),
                    zone=order.zones[index % len(order.zones)],
                ),
                order.boot,
            )
            for index in range(launch.count)
        ]

    def _ensure(self, launch: LaunchRequest, boot: Boot) -> MachineDirectory:
        if devices := self._least_used():
            launch = replace(launch, devices=devices)
            boot = replace(boot, env={**boot.env, VISIBLE: ",".join(devices)})
        with contextlib.suppress(FileExistsError):
            return MachineDirectory.create(self._machines, launch, boot)
        return MachineDirectory(self._machines / launch.id)

    def _least_used(self) -> list[str]:
        """Return the GPUs for one more machine: those that the fewest machines see."""
        users = Counter(name for one in self._unreaped() for name in one.launch().devices)
        return sorted(self.devices, key=users.__getitem__)[: self.pool.gpus or 0]

    def _granted(self, count: int, token: str) -> int:
        first = MachineDirectory(self._machines / self._id(token, 0))
        if first.path.exists():
            return first.launch().count
        occupied = [one for one in self.machines() if one.state is not MachineState.LEAVING]
        capacity = self.pool.max_machines
        if capacity is None:
            return count
        if capacity <= len(occupied):
            raise NoCapacity(f"{self.pool.name}: {len(occupied)} of {capacity} machines in use")
        return min(count, capacity - len(occupied))

    def _id(self, token: str, index: int) -> str:
        # Includes the home, because a process's marker must not match a machine of another home.
        key = "\0".join([str(self._home), self._cluster, self._configured.name, token, str(index)])
        return f"{self._configured.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the launch lock, which ends with its holder. Raises :class:`FleetError`."""
        self._machines.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with hold_lock(self._machines / ".lock", LOCK_LIMIT_SECONDS):
                yield
        except TimeoutError as error:
            raise FleetError(f"{self._machines}: another launch does not finish") from error

    def _directories(self) -> Iterator[MachineDirectory]:
        for path in sorted(self._machines.glob(f"{self._configured.name}-*")):
            with contextlib.suppress(FleetError):
                directory = MachineDirectory(path)
                launch = directory.launch()
                if (launch.cluster, launch.pool) == (self._cluster, self._configured.name):
                    yield directory

    def _unreaped(self) -> Iterator[MachineDirectory]:
        return (directory for directory in self._directories() if not directory.reaped())

    def _find(self, machine_id: str) -> MachineDirectory | None:
        return next((one for one in self._unreaped() if one.id == machine_id), None)

    def _end(self, directory: MachineDirectory, reason: str) -> None:
        directory.mark_terminated(reason)
        if directory.reap():
            self._remove_old()

    def _remove_old(self) -> None:
        with contextlib.suppress(FleetError):  # Another process cleans up too.
            dead = [one for one in self._directories() if one.reaped()]
            dead.sort(key=lambda one: one.launch().launched_at)
            for directory in dead[:-KEPT_DEAD]:
                directory.remove()


def _price(spec: LocalPoolSpec, *, spot: bool) -> float:
    """Return the price of a machine in USD per hour."""
    template = spec.template
    return (template.price_per_hour if spot else template.on_demand_price_per_hour) or 0.0
