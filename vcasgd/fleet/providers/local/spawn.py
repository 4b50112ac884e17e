"""Starts the processes of local machines, detached and with a clean environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import vcasgd
from vcasgd.child_process import kill
from vcasgd.errors import FleetError
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.local import machine as local_machine
from vcasgd.fleet.providers.local.directory import MachineDirectory
from vcasgd.fleet.providers.local.processes import MARKER
from vcasgd.fleet.providers.local.template import MachineTemplate
from vcasgd.fork_server import ForkedCommand

#: Seconds after which an interpreter that has not started never will, even on a busy machine.
SPAWN_LIMIT_SECONDS = 120.0


class Spawner:
    """Starts the machines of a provider."""

    def __init__(self) -> None:
        self._template: MachineTemplate | None = None
        self._lock = threading.Lock()

    def spawn(self, directories: Sequence[MachineDirectory], boot: Boot) -> None:
        """Start the machines' processes. Raises :class:`FleetError` if one fails to start."""
        starting = [(directory, self._start(directory, boot)) for directory in directories]
        failed = [str(directory.log) for directory, one in starting if not _up(directory, one)]
        if failed:
            raise FleetError("a machine did not start", remedy=f"see {', '.join(failed)}")

    def close(self) -> None:
        """End the template, if any. Machines that run are not affected."""
        with self._lock:
            template, self._template = self._template, None
        if template is not None:
            template.close()

    def _start(
        self, directory: MachineDirectory, boot: Boot
    ) -> subprocess.Popen[bytes] | ForkedCommand:
        argv = ["-m", local_machine.__name__, "--directory", str(directory.path)]
        env = _base_environment(os.environ)
        own = {**env, MARKER: directory.id}
        with directory.log.open("ab") as output:
            if boot.imports:
                with contextlib.suppress(OSError):
                    template = self._fitting(boot.imports, {**env, **boot.env})
                    return template.run(argv, own, directory.path, output)
            return subprocess.Popen(
                [sys.executable, *argv],
                env=own,
                cwd=directory.path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _fitting(self, imports: Sequence[str], env: Mapping[str, str]) -> MachineTemplate:
        with self._lock:
            if self._template is None or not self._template.fits(imports, env):
                if self._template is not None:
                    self._template.close()
                self._template = MachineTemplate(imports, env)
            return self._template


def _up(directory: MachineDirectory, starting: subprocess.Popen[bytes] | ForkedCommand) -> bool:
    """Wait until the process has forked the machine as a daemon, and return True on success."""
    try:
        status: int | None = starting.wait(SPAWN_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        status = kill(starting)
    if status == 0 or directory.marked_terminated():  # Ended right after its launch: not an error.
        return True
    directory.mark_terminated(f"its interpreter ended with status {status}")
    return False


def _base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a fresh machine: this package, but none of our variables."""
    base = {name: value for name, value in environment.items() if not name.startswith("VCASGD_")}
    package_root = Path(vcasgd.__file__).parents[1]
    if package_root.name != "site-packages":  # A checkout that is not installed.
        base["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(package_root), base.get("PYTHONPATH")])
        )
    return base
