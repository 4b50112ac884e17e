"""Machines of the local provider: real processes, with children that leave their session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from support.waiting import await_truth
from vcasgd.fleet.pools import LocalPoolSpec, LocalTemplate
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.local.directory import MachineDirectory
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.schemas.fleet import Machine, MachineState

#: A child, a grandchild in its own session, and an orphan that hides its environment.
FAMILY = """
echo $$ > pids
setsid sleep 300 &
echo $! >> pids
(setsid env -i sleep 300 & echo $! >> pids)
echo "$GREETING" > greeting
echo done > ready
wait
"""
BOOT = Boot(("sh", "-c", FAMILY), {"GREETING": "hello {machine_id}", "PATH": os.environ["PATH"]})
TEMPLATE = LocalTemplate(price_per_hour=0.5, notice_seconds=600.0)
POOL = LocalPoolSpec(name="local", provider="local", max_machines=2, template=TEMPLATE)


class LocalCluster:
    """Provider with helpers to inspect its machines."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.provider = self.another()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.provider.destroy_all()

    def another(self, owner_grace_seconds: float | None = None) -> LocalProvider:
        """Return a provider as in another process, which shares only the home."""
        return LocalProvider(self.home, "test", POOL, owner_grace_seconds=owner_grace_seconds)

    def launch(self, count: int = 1, token: str = "t1", boot: Boot = BOOT) -> list[str]:
        return self.provider.launch("local", count, boot, token)

    def launch_ready(self) -> tuple[str, list[Process]]:
        """Return one running machine and all of its processes."""
        (id_,) = self.launch()
        await_truth((self.directory(id_).path / "ready").exists)
        return id_, self.processes(id_)

    def directory(self, id_: str) -> MachineDirectory:
        return MachineDirectory(self.home / "machines" / id_)

    def root(self, id_: str) -> Process:
        machine = self.directory(id_).running()
        assert machine is not None
        return machine.process

    def processes(self, id_: str) -> list[Process]:
        pids = (self.directory(id_).path / "pids").read_text().split()
        assert len(pids) == 3
        return [self.root(id_), *(Process.of(int(pid)) for pid in pids)]

    def machine(self, id_: str) -> Machine:
        (one,) = (each for each in self.another().machines() if each.id == id_)
        return one

    def state(self, id_: str) -> MachineState | None:
        return next((one.state for one in self.another().machines() if one.id == id_), None)

    def await_state(self, id_: str, state: MachineState | None) -> None:
        await_truth(lambda: self.state(id_) is state)

    def await_death(self, processes: list[Process]) -> None:
        await_truth(lambda: not any(process.alive() for process in processes))
