"""What runs on a machine of a cloud: the boot command, and ears for the system's farewell.

Started by the unit of the image, with what the launch wrote for this machine in the environment
(:mod:`~vcasgd.fleet.providers.user_data`)::

    python -m vcasgd.fleet.machine.main

It asks the metadata server which machine this is, fetches the secrets that the user data only
names, runs the boot command, and ends with it. A system that shuts down says so by SIGTERM (ACPI
shutdown, which is how Google preempts): this becomes a notice to the worker, and the command is
ended when the worker has had its time.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vcasgd.errors import FleetError, SpecError, VcasgdError
from vcasgd.fleet.machine.metadata import identity
from vcasgd.fleet.machine.notices import NOTICE_FILE_VARIABLE, write_notice
from vcasgd.fleet.machine.secrets import aws_secret, gcp_secret
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.user_data import ARGV_VARIABLE, REGION_VARIABLE, SECRETS_VARIABLE

T = TypeVar("T")

log = logging.getLogger(__name__)

#: how long a fresh machine tries to learn what it needs
PATIENCE_SECONDS, RETRY_SECONDS = 120.0, 1.0
#: how long a worker has after SIGTERM; Google takes the machine after half a minute
GRACE_SECONDS = 20.0
#: how long the command has to end when it is told to
STOP_SECONDS = 3.0
#: how soon a SIGTERM is seen
POLL_SECONDS = 0.1


def boot_of(environment: Mapping[str, str]) -> Boot:
    """What this machine runs. Raises :class:`~vcasgd.errors.SpecError` for what no launch wrote,
    and :class:`~vcasgd.errors.FleetError` where nobody answers."""
    argv, secrets = (
        _read(environment, ARGV_VARIABLE, list),
        _read(environment, SECRETS_VARIABLE, dict),
    )
    kind, url = (
        environment.get("VCASGD_METADATA_KIND", "aws"),
        environment.get("VCASGD_METADATA_URL"),
    )
    own = {name: _secret(name, secret, kind, environment) for name, secret in secrets.items()}
    env = {name: value for name, value in environment.items() if name not in _LAUNCH}
    return Boot(tuple(argv), {**env, **own}).on(_patiently(lambda: identity(kind, url)))


_LAUNCH = (ARGV_VARIABLE, SECRETS_VARIABLE, REGION_VARIABLE)


class MachineConfig:
    """The boot command while it runs."""

    def __init__(self, boot: Boot, notice: Path, grace_seconds: float = GRACE_SECONDS) -> None:
        self._notice = notice
        self._grace = grace_seconds
        self._told = threading.Event()
        env = {**boot.env, NOTICE_FILE_VARIABLE: str(notice)}
        self._process = subprocess.Popen(boot.argv, env=env, stdin=subprocess.DEVNULL)

    def shut_down(self) -> None:
        """The system goes: the worker is told, and the command ended after the grace time."""
        self._told.set()

    def run(self) -> int:
        """Until the command has ended; its exit status."""
        while self._process.poll() is None and not self._told.is_set():
            self._told.wait(POLL_SECONDS)
        if self._process.poll() is None:
            write_notice(self._notice, time.time() + self._grace)
            self._await(self._grace)
            self._process.terminate()
            self._await(STOP_SECONDS)
            self._process.kill()
        return self._process.wait()

    def _await(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            log.info("still running after %g s", seconds)


def _read(environment: Mapping[str, str], name: str, kind: type[T]) -> T:
    try:
        value: Any = json.loads(environment.get(name, ""))
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise SpecError(f"{name} is not what a launch writes", field=name)
    return value


def _secret(name: str, secret: str, kind: str, environment: Mapping[str, str]) -> str:
    """What the image has put into the environment already is not fetched again."""
    if value := environment.get(name):
        return value
    if kind == "gcp":
        return _patiently(lambda: gcp_secret(secret, environment.get("VCASGD_METADATA_URL")))
    return _patiently(lambda: aws_secret(secret, environment.get(REGION_VARIABLE, "")))


def _patiently(ask: Callable[[], T]) -> T:
    """A role or a route may take a while to be there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except FleetError as error:
            if time.monotonic() > deadline:
                raise
            log.warning("%s", error)
            time.sleep(RETRY_SECONDS)


def main() -> int:
    """Exit status of the command; 2 if it could not be started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        boot = boot_of(os.environ)
    except VcasgdError as error:
        log.error("%s", error)
        return 2
    with tempfile.TemporaryDirectory(prefix="vcasgd-") as folder:
        machine = MachineConfig(boot, Path(folder) / "notice")
        signal.signal(signal.SIGTERM, lambda _number, _frame: machine.shut_down())
        return machine.run()


if __name__ == "__main__":
    sys.exit(main())
