"""Starts the processes of local machines, detached and with a clean environment.

Local machines are processes of one computer, so they share what they import, as forks of one
process: a machine starts in milliseconds, and all of them together need the memory of one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import vcasgd
from vcasgd.child_process import kill
from vcasgd.errors import FleetError
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.local import machine as local_machine
from vcasgd.fleet.providers.local.directory import MachineDirectory
from vcasgd.fleet.providers.local.processes import MARKER
from vcasgd.fork_server import ForkedCommand, ForkServer, pass_connection, preload

#: Seconds after which an interpreter that has not started never will, even on a busy machine.
SPAWN_LIMIT_SECONDS = 120.0
#: Prefix of variables that no library reads when it is imported.
OWN_VARIABLES = "VCASGD_"


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
    base = _read_by_libraries(environment)
    package_root = Path(vcasgd.__file__).parents[1]
    if package_root.name != "site-packages":  # A checkout that is not installed.
        base["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(package_root), base.get("PYTHONPATH")])
        )
    return base


class MachineTemplate:
    """Process that machines are forks of. It ends with its owner.

    It can run commands with the environment ``env``; only variables of vcasgd may differ.
    """

    def __init__(self, imports: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it; its first command waits until it has imported ``imports``."""
        self._made_for = tuple(imports), _read_by_libraries(env)
        self._pair, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *imports],
                env=dict(env),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fits(self, imports: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return True if it lives and can run commands with these modules and this environment."""
        return self._process.poll() is None and self._made_for == (
            tuple(imports),
            _read_by_libraries(env),
        )

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: BinaryIO
    ) -> ForkedCommand:
        """Start a command. Raises :class:`OSError`."""
        return ForkedCommand(pass_connection(self._pair), argv, env, cwd, output)

    def close(self) -> None:
        """End the process. Machines that run are not affected."""
        self._pair.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        kill(self._process)


def _read_by_libraries(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables but those of vcasgd."""
    return {name: value for name, value in env.items() if not name.startswith(OWN_VARIABLES)}


def main() -> None:
    descriptor, *imports = sys.argv[1:]
    pair = socket.socket(fileno=int(descriptor))
    # Machines must not keep it open.
    pair.set_inheritable(False)
    preload(imports)
    ForkServer(pair).serve()


if __name__ == "__main__":
    main()
