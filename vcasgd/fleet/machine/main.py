"""Process that runs the boot command on a machine in a cloud.

The image's unit starts it with the environment that the launch wrote
(:mod:`~vcasgd.fleet.providers.user_data`)::

    python -m vcasgd.fleet.machine.main

It gets the machine's id from the metadata server, fetches the secrets that the user data names,
runs the boot command, and ends with it. A system that shuts down sends SIGTERM (ACPI shutdown,
which is how Google preempts). The process passes that to the worker as a notice, and ends the
command after the grace time.
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

from vcasgd.backoff import backoff, jittered
from vcasgd.child_process import kill
from vcasgd.errors import FleetError, SpecError, VcasgdError
from vcasgd.fleet.machine.metadata import identity
from vcasgd.fleet.machine.notices import NOTICE_FILE_VARIABLE, write_notice
from vcasgd.fleet.machine.secrets import aws_secret, gcp_secret
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.user_data import ARGV_VARIABLE, REGION_VARIABLE, SECRETS_VARIABLE

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds that a new machine retries to get its id and secrets.
PATIENCE_SECONDS = 120.0
#: First and longest pause between two attempts, in seconds.
FIRST_PAUSE, MAX_PAUSE = 0.5, 8.0
#: Seconds that a worker has after SIGTERM; Google takes the machine after half a minute.
GRACE_SECONDS = 20.0
#: Seconds that the command has to end after SIGTERM.
STOP_SECONDS = 3.0
#: Seconds between two polls for a shutdown.
POLL_SECONDS = 0.1


def boot_of(environment: Mapping[str, str]) -> Boot:
    """Return what this machine runs.

    Raises :class:`~vcasgd.errors.SpecError` if the environment isn't from a launch, and
    :class:`~vcasgd.errors.FleetError` if a service doesn't respond.
    """
    argv, secrets = (
        _read(environment, ARGV_VARIABLE, list),
        _read(environment, SECRETS_VARIABLE, dict),
    )
    kind, url = (
        environment.get("VCASGD_METADATA_KIND", "aws"),
        environment.get("VCASGD_METADATA_URL"),
    )
    fetched = {name: _secret(name, secret, kind, environment) for name, secret in secrets.items()}
    env = {name: value for name, value in environment.items() if name not in _LAUNCH}
    return Boot(tuple(argv), {**env, **fetched}).on(_retry(lambda: identity(kind, url)))


#: Variables for this process, which the boot command doesn't get.
_LAUNCH = (ARGV_VARIABLE, SECRETS_VARIABLE, REGION_VARIABLE)


class BootProcess:
    """Running boot command."""

    def __init__(self, boot: Boot, notice: Path, grace_seconds: float = GRACE_SECONDS) -> None:
        self._notice = notice
        self._grace = grace_seconds
        self._shutdown = threading.Event()
        env = {**boot.env, NOTICE_FILE_VARIABLE: str(notice)}
        self._process = subprocess.Popen(boot.argv, env=env, stdin=subprocess.DEVNULL)

    def shut_down(self) -> None:
        """Give notice to the worker, and end the command after the grace time."""
        self._shutdown.set()

    def run(self) -> int:
        """Wait for the end of the command, and return its exit status."""
        while self._process.poll() is None and not self._shutdown.is_set():
            self._shutdown.wait(POLL_SECONDS)
        if self._process.poll() is None:
            write_notice(self._notice, self._grace)
            self._await(self._grace)
            self._process.terminate()
            self._await(STOP_SECONDS)
        status = kill(self._process)
        return 1 if status is None else status

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
        raise SpecError(f"{name} has no value from a launch", field=name)
    return value


def _secret(name: str, secret: str, kind: str, environment: Mapping[str, str]) -> str:
    """Return a secret, and fetch it unless the image has set it in the environment."""
    if value := environment.get(name):
        return value
    if kind == "gcp":
        return _retry(lambda: gcp_secret(secret, environment.get("VCASGD_METADATA_URL")))
    return _retry(lambda: aws_secret(secret, environment.get(REGION_VARIABLE, "")))


def _retry(fetch: Callable[[], T]) -> T:
    """Call until it succeeds; roles and routes of a new machine take a while to exist."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    failures = 0
    while True:
        try:
            return fetch()
        except FleetError as error:
            if time.monotonic() > deadline:
                raise
            log.warning("%s", error)
            failures += 1
            time.sleep(jittered(backoff(failures, FIRST_PAUSE, MAX_PAUSE)))


def main() -> int:
    """Return the exit status of the command; 2 if it could not be started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        boot = boot_of(os.environ)
    except VcasgdError as error:
        log.error("%s", error)
        return 2
    with tempfile.TemporaryDirectory(prefix="vcasgd-") as folder:
        machine = BootProcess(boot, Path(folder) / "notice")
        signal.signal(signal.SIGTERM, lambda _number, _frame: machine.shut_down())
        return machine.run()


if __name__ == "__main__":
    sys.exit(main())
