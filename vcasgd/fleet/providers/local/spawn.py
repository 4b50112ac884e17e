"""Starts the processes of local instances, detached and with a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import vcasgd
from vcasgd.errors import FleetError
from vcasgd.fleet.providers.local import instance as local_instance
from vcasgd.fleet.providers.local.directory import InstanceDirectory
from vcasgd.fleet.providers.local.processes import MARKER

#: Seconds after which an interpreter that has not started never will, even on a busy machine.
SPAWN_LIMIT_SECONDS = 120.0


def spawn(directories: list[InstanceDirectory]) -> None:
    """Start the machines' processes. Raises :class:`FleetError` if an interpreter fails."""
    starting = [(directory, _process(directory)) for directory in directories]
    failed = [str(directory.log) for directory, process in starting if not _up(directory, process)]
    if failed:
        raise FleetError("a machine did not start", remedy=f"see {', '.join(failed)}")


def _up(directory: InstanceDirectory, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the process has forked the machine as a daemon, and return True on success."""
    try:
        status = process.wait(SPAWN_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait(SPAWN_LIMIT_SECONDS)
    if status == 0 or directory.marked_terminated():  # Ended right after its launch: not an error.
        return True
    directory.mark_terminated(f"its interpreter ended with status {status}")
    return False


def _process(directory: InstanceDirectory) -> subprocess.Popen[bytes]:
    with directory.log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", local_instance.__name__, "--directory", str(directory.path)],
            env={**_base_environment(os.environ), MARKER: directory.id},
            cwd=directory.path,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a fresh machine: this package, but none of our variables."""
    base = {name: value for name, value in environment.items() if not name.startswith("VCASGD_")}
    package_root = Path(vcasgd.__file__).parents[1]
    if package_root.name != "site-packages":  # A checkout that is not installed.
        base["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(package_root), base.get("PYTHONPATH")])
        )
    return base
