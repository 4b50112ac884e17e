"""The directory of a local instance: what is known about it, and nowhere else.

Each file has one kind of writer and is written whole or not at all, so neither a crash nor
two processes at once leave a half-truth::

    instance.json    the provider, at the launch     pool, token, price, …
    boot.json        the provider, at the launch     what to run; the machine deletes it
    machine.json     the machine                     its process, its metadata port
    notice.json      whoever evicts, once            when the machine goes
    condemned.json   whoever ends it, once           why; from now on the instance is GONE
    buried.json      whoever saw that nothing of it lives any more
    lock             held by the machine's process
    instance.log     what its processes print

The state is derived from these and from the process, so it can't be out of date.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vcasgd.errors import FleetError
from vcasgd.fleet.providers.base import Boot, Instance, InstanceState
from vcasgd.fleet.providers.local.processes import Process, kill_all

#: a launch whose machine has not reported its process by then came to nothing
START_LIMIT_SECONDS = 120.0
#: a machine that outlives its notice by this much is taken by whoever sees it
NOTICE_SLACK_SECONDS = 5.0
#: what can't be killed by then (it hangs in the kernel) is tried again at the next look
BURIAL_LIMIT_SECONDS = 5.0
#: begins the name of a directory that is not complete yet
UNFINISHED = ".new-"


@dataclass(frozen=True)
class LaunchRequest:
    """What was asked for; never changes."""

    id: str
    cluster: str
    pool: str
    token: str
    count: int
    """How many machines the launch was granted."""
    launched_at: float
    price_per_hour: float
    boot_seconds: float
    owner_grace_seconds: float | None
    spot: bool = True
    zone: str = ""
    instance_type: str = ""
    on_demand_price_per_hour: float = 0.0


@dataclass(frozen=True)
class MachineRecord:
    """The running machine, as it reports itself."""

    process: Process
    metadata_port: int
    up: bool


class InstanceDirectory:
    """One instance of the local provider, for reading and for the few writes there are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.log = path / "instance.log"

    @classmethod
    def create(cls, instances: Path, launch: LaunchRequest, boot: Boot) -> InstanceDirectory:
        """Complete or not at all. Raises :class:`FileExistsError` if there is one already."""
        final = instances / launch.id
        if final.exists():
            raise FileExistsError(final)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=instances))
        write_json(unfinished / "instance.json", asdict(launch))
        write_json(unfinished / "boot.json", {"argv": boot.argv, "env": boot.env})
        unfinished.rename(final)
        return cls(final)

    def launch(self) -> LaunchRequest:
        """Raises :class:`FleetError` if the directory was removed meanwhile, or is damaged."""
        value = read_json(self.path / "instance.json")
        if value is None:
            raise FleetError(f"{self.path}: is no instance")
        return LaunchRequest(**value)

    def take_boot(self) -> Boot:
        """What to run; only once, since it may hold passwords. Raises :class:`FleetError`."""
        value = read_json(self.path / "boot.json")
        if value is None:
            raise FleetError(f"{self.path}: has been started before")
        (self.path / "boot.json").unlink(missing_ok=True)
        return Boot(tuple(value["argv"]), dict(value["env"]))

    def machine(self) -> MachineRecord | None:
        """``None``: not started yet."""
        value = read_json(self.path / "machine.json")
        if value is None:
            return None
        return MachineRecord(Process(**value["process"]), value["metadata_port"], value["up"])

    def report(self, machine: MachineRecord) -> None:
        write_json(self.path / "machine.json", asdict(machine))

    def notice_at(self) -> float | None:
        value = read_json(self.path / "notice.json")
        return None if value is None else float(value["at"])

    def notify(self, at: float) -> None:
        """The first notice stands."""
        write_once(self.path / "notice.json", {"at": at})

    def condemned(self) -> bool:
        return (self.path / "condemned.json").exists()

    def condemn(self, reason: str) -> None:
        """From now on the instance is ``GONE``; the first reason stands."""
        write_once(self.path / "condemned.json", {"reason": reason, "at": time.time()})

    def buried(self) -> bool:
        return (self.path / "buried.json").exists()

    def bury(self) -> bool:
        """Kills what is left of a condemned instance; ``False`` if some of it survives.

        The machine's own process goes last: as long as it exists it adopts orphans, so
        that none of them gets out of sight.
        """
        machine = self.machine()
        process = machine.process if machine else None
        dead = all(
            kill_all(self.id, process, spare=spare, limit=BURIAL_LIMIT_SECONDS)
            for spare in (process, None)
        )
        if dead:
            write_once(self.path / "buried.json", {"at": time.time()})
        return dead

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def verdict(self, now: float) -> str | None:
        """Why the instance is ``GONE``; ``None`` while it is not."""
        machine, notice_at = self.machine(), self.notice_at()
        if self.condemned():
            return "condemned"
        if machine is None and now > self.launch().launched_at + START_LIMIT_SECONDS:
            return "did not start"
        if machine is not None and not machine.process.alive():
            return "its process died"
        if notice_at is not None and now > notice_at + NOTICE_SLACK_SECONDS:
            return "outlived its notice"
        return None

    def instance(self, now: float) -> Instance:
        launch, notice_at = self.launch(), self.notice_at()
        return Instance(
            id=self.id,
            pool=launch.pool,
            state=self._state(notice_at, now),
            launched_at=launch.launched_at,
            notice_at=notice_at,
            host="127.0.0.1",
            price_per_hour=launch.price_per_hour,
            spot=launch.spot,
            zone=launch.zone,
            instance_type=launch.instance_type,
            on_demand_price_per_hour=launch.on_demand_price_per_hour,
        )

    def _state(self, notice_at: float | None, now: float) -> InstanceState:
        if self.verdict(now) is not None:
            return InstanceState.GONE
        if notice_at is not None:
            return InstanceState.LEAVING
        machine = self.machine()
        return InstanceState.RUNNING if machine and machine.up else InstanceState.BOOTING


def read_json(path: Path) -> dict[str, Any] | None:
    """``None`` if there is no such file. Raises :class:`FleetError` if it is damaged."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FleetError(f"{path}: can't be read: {error}") from error
    if not isinstance(value, dict):
        raise FleetError(f"{path}: is not a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces the file at once; readable by its owner only."""
    _temporary(path, value).replace(path)


def write_once(path: Path, value: dict[str, Any]) -> None:
    """The first writer wins; silent if the file is there, or its directory no longer is."""
    try:
        temporary = _temporary(path, value)
    except FileNotFoundError:
        return
    try:
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):
        return
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path, value: dict[str, Any]) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file)
    return Path(name)
