"""Directory of a local machine: the only place where its state is kept.

Each file has one kind of writer and is written completely or not at all, so neither a crash nor
two concurrent processes leave a half-written state::

    launch.json      written by the provider at the launch: pool, token, price, …
    boot.json        written by the provider at the launch: what to run; the machine deletes it
    process.json     written by the machine: its process
    notice.json      written once by whichever process evicts: when the machine goes
    notice           written by the machine for its worker: the same time, as a notice file
    condemned.json   written once by whichever process ends it: why; the machine is now GONE
    buried.json      written by the process that found nothing of it alive
    lock             held by the machine's process
    machine.log     output of its processes

The state is derived from these files and from the process, so it is always current.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vcasgd.errors import FleetError
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.local.processes import Process, kill_all
from vcasgd.local_files import write_private
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.steady_time import boot_time, steady_time, unix_time

#: Seconds after which a launch whose machine has not reported its process has failed.
START_LIMIT_SECONDS = 120.0
#: Seconds by which a machine may outlive its notice before any process that sees it ends it.
NOTICE_SLACK_SECONDS = 5.0
#: Seconds for killing a machine's processes. If some hang in the kernel, the next poll retries.
REAP_LIMIT_SECONDS = 5.0
#: Prefix of directories that are not complete yet.
UNFINISHED = ".new-"


@dataclass(frozen=True)
class LaunchRequest:
    """Immutable request for one machine, with the prices at its launch in USD per hour."""

    id: str
    cluster: str
    pool: str
    token: str
    count: int
    """Number of machines granted to the launch."""
    launched_at: float
    price_per_hour: float
    boot_seconds: float
    owner_grace_seconds: float | None
    spot: bool = True
    zone: str = ""
    machine_type: str = ""
    on_demand_price_per_hour: float = 0.0
    devices: Sequence[str] = ()
    """GPUs that the machine sees; all if there are none."""


@dataclass(frozen=True)
class RunningProcess:
    """Record that a running machine writes about itself."""

    process: Process
    up: bool


class MachineDirectory:
    """Reader and writer for the files of one local machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.log = path / "machine.log"

    @classmethod
    def create(cls, machines: Path, launch: LaunchRequest, boot: Boot) -> MachineDirectory:
        """Create the directory atomically. Raises :class:`FileExistsError` if it exists."""
        final = machines / launch.id
        if final.exists():
            raise FileExistsError(final)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=machines))
        write_json(unfinished / "launch.json", asdict(launch))
        write_json(unfinished / "boot.json", {"argv": boot.argv, "env": boot.env})
        unfinished.rename(final)
        return cls(final)

    def launch(self) -> LaunchRequest:
        """Return the launch. Raises :class:`FleetError` if the directory is missing or damaged."""
        value = read_json(self.path / "launch.json")
        if value is None:
            raise FleetError(f"{self.path}: is not a machine")
        return LaunchRequest(**value)

    def take_boot(self) -> Boot:
        """Return what to run, and delete it, because it may contain passwords.

        Raises :class:`FleetError` if it was taken before.
        """
        value = read_json(self.path / "boot.json")
        if value is None:
            raise FleetError(f"{self.path}: was started before")
        (self.path / "boot.json").unlink(missing_ok=True)
        return Boot(tuple(value["argv"]), dict(value["env"]))

    def running(self) -> RunningProcess | None:
        """Return the record of the machine, or None if it has not started."""
        value = read_json(self.path / "process.json")
        if value is None:
            return None
        return RunningProcess(Process(**value["process"]), value["up"])

    def report(self, machine: RunningProcess) -> None:
        """Record the state of the machine."""
        write_json(self.path / "process.json", asdict(machine))

    def notice_at(self) -> float | None:
        """Return when the machine goes (:func:`steady_time`), or None without a notice."""
        value = read_json(self.path / "notice.json")
        return None if value is None else unix_time(value["at"])

    def notify(self, seconds: float) -> None:
        """Give notice that the machine goes in so many seconds, unless it has one."""
        write_once(self.path / "notice.json", {"at": boot_time() + seconds})

    @property
    def notice_file(self) -> Path:
        """File through which the machine notifies its worker."""
        return self.path / "notice"

    def marked_terminated(self) -> bool:
        return (self.path / "condemned.json").exists()

    def mark_terminated(self, reason: str) -> None:
        """Make the machine ``GONE``. The first reason is kept."""
        with suppress(FleetError):  # Its processes end on a full disk, too.
            write_once(self.path / "condemned.json", {"reason": reason, "at": time.time()})

    def reaped(self) -> bool:
        """Return True if no process of the ended machine is left."""
        return (self.path / "buried.json").exists()

    def reap(self) -> bool:
        """Kill the remaining processes of an ended machine. Returns False if some survive.

        The machine's own process is killed last: while it lives it adopts orphans, so they can
        be found.
        """
        machine = self.running()
        process = machine.process if machine else None
        dead = all(
            kill_all(self.id, process, spare=spare, limit=REAP_LIMIT_SECONDS)
            for spare in (process, None)
        )
        if dead:
            with suppress(FleetError):
                write_once(self.path / "buried.json", {"at": time.time()})
        return dead

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def gone_reason(self, now: float) -> str | None:
        """Return why the machine is ``GONE``, or None if it isn't."""
        machine, notice_at = self.running(), self.notice_at()
        if self.marked_terminated():
            return "terminated"
        if machine is None and now > self.launch().launched_at + START_LIMIT_SECONDS:
            return "did not start"
        if machine is not None and not machine.process.alive():
            return "its process died"
        if notice_at is not None and steady_time() > notice_at + NOTICE_SLACK_SECONDS:
            return "outlived its notice"
        return None

    def machine(self, now: float) -> Machine:
        """Return the provider's record. Raises :class:`FleetError` if the files are gone."""
        launch, notice_at = self.launch(), self.notice_at()
        return Machine(
            id=self.id,
            pool=launch.pool,
            state=self._state(notice_at, now),
            launched_at=launch.launched_at,
            notice_at=notice_at,
            host="127.0.0.1",
            price_per_hour=launch.price_per_hour,
            spot=launch.spot,
            zone=launch.zone,
            machine_type=launch.machine_type,
            on_demand_price_per_hour=launch.on_demand_price_per_hour,
        )

    def _state(self, notice_at: float | None, now: float) -> MachineState:
        if self.gone_reason(now) is not None:
            return MachineState.GONE
        if notice_at is not None:
            return MachineState.LEAVING
        machine = self.running()
        return MachineState.RUNNING if machine and machine.up else MachineState.BOOTING


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object, or None without a file.

    Raises :class:`FleetError` if the file is damaged.
    """
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
    """Replace a file atomically; only its owner can read it."""
    write_private(path, json.dumps(value))


def write_once(path: Path, value: dict[str, Any]) -> None:
    """Write a file unless it exists or its directory was removed; the first writer wins.

    Raises :class:`FleetError` if it can't be written.
    """
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f".{path.name}-", dir=path.parent) as file:
            json.dump(value, file)
            file.flush()
            os.link(file.name, path)
    except (FileExistsError, FileNotFoundError):
        pass
    except OSError as error:
        raise FleetError(f"{path}: can't be written: {error}") from error
