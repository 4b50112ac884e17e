"""Process that runs the boot command on a machine in a cloud.

The image's unit starts it with the environment that the launch wrote
(:mod:`~vcasgd.fleet.providers.user_data`)::

    python -m vcasgd.machine.main

It gets the machine's id from the metadata server, fetches the secrets that the user data names,
runs the boot command, and ends with it. Meanwhile, it writes the machine's notice file, which all
processes of the command read:

* The cloud announces the end of the machine: the notice has the cloud's time.
* The system shuts down and sends SIGTERM (ACPI shutdown, which is how Google preempts), or no
  controller has given a sign of life for ``VCASGD_ORPHAN_SECONDS``, so that no other process would
  ever end the machine: the command ends after the grace time.
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
from vcasgd.fleet.metadata import gcp_secret, identity
from vcasgd.fleet.notices import (
    NOTICE_FILE_VARIABLE,
    Notice,
    NoticeKind,
    NoticeSource,
    notices_of_cloud,
    write_notice,
)
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.user_data import ARGV_VARIABLE, REGION_VARIABLE, SECRETS_VARIABLE
from vcasgd.steady_time import boot_time
from vcasgd.storage.objects import SIGNS, Silence, Storage, read_life_sign
from vcasgd.threads import EssentialThread

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
#: Seconds between two polls of the cloud for a notice. AWS recommends five, and gives two minutes.
NOTICE_SECONDS = 1.0


def boot_of(environment: Mapping[str, str]) -> Boot:
    """Return what this machine runs.

    Raises :class:`~vcasgd.errors.SpecError` if the environment isn't from a launch, and
    :class:`~vcasgd.errors.FleetError` if a service doesn't respond.
    """
    argv = _read(environment, ARGV_VARIABLE, list)
    secrets = _read(environment, SECRETS_VARIABLE, dict)
    kind = environment.get("VCASGD_METADATA_KIND", "aws")
    url = environment.get("VCASGD_METADATA_URL")
    fetched = {name: _secret(name, secret, kind, environment) for name, secret in secrets.items()}
    env = {name: value for name, value in environment.items() if name not in _LAUNCH}
    return Boot(tuple(argv), {**env, **fetched}).on(_retry(lambda: identity(kind, url)))


#: Variables for this process, which the boot command doesn't get.
_LAUNCH = (ARGV_VARIABLE, SECRETS_VARIABLE, REGION_VARIABLE)


class BootProcess:
    """Running boot command."""

    def __init__(self, boot: Boot, notice: Path) -> None:
        self._notice = notice
        self._shutdown = threading.Event()
        env = {**boot.env, NOTICE_FILE_VARIABLE: str(notice)}
        self._process = subprocess.Popen(boot.argv, env=env, stdin=subprocess.DEVNULL)

    def shut_down(self) -> None:
        """Give notice to the worker, and end the command after the grace time."""
        self._shutdown.set()

    def watch_notices(self, source: NoticeSource) -> None:
        """Write the cloud's notices to the file, until the end of this process."""
        last: Notice | None = None
        while not self._shutdown.is_set():
            notice = source.poll()
            if notice is not None and notice != last:
                log.warning("notice of eviction: %s", notice)
                seconds = None if notice.at is None else notice.at - time.time()
                if write_notice(self._notice, notice.kind, seconds):
                    last = notice
            time.sleep(NOTICE_SECONDS)

    def watch_controller(self, storage: Storage, orphan_seconds: float) -> None:
        """Shut down after too long a time without a sign of a controller."""
        silence = Silence(boot_time())
        while (seconds := silence.seconds(read_life_sign(storage), boot_time())) < orphan_seconds:
            time.sleep(orphan_seconds / SIGNS / 2)
        log.error("no sign of a controller for %.0f s: the machine ends", seconds)
        self.shut_down()

    def run(self) -> int:
        """Wait for the end of the command, and return its exit status."""
        while self._process.poll() is None and not self._shutdown.is_set():
            self._shutdown.wait(POLL_SECONDS)
        if self._process.poll() is None:
            write_notice(self._notice, NoticeKind.TERMINATE, GRACE_SECONDS)
            self._await(GRACE_SECONDS)
            self._process.terminate()
            self._await(STOP_SECONDS)
        status = kill(self._process)
        return 1 if status is None else status

    def _await(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            log.info("still running after %g s", seconds)


class _Watch(EssentialThread):
    """Thread without which the machine would miss an eviction, or never end."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name)
        self._work = work

    def work(self) -> None:
        self._work()


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
    # It needs boto3, which only machines in AWS have.
    from vcasgd.fleet.providers import aws_calls

    return _retry(lambda: aws_calls.secret(secret, environment.get(REGION_VARIABLE, "")))


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
        boot, source = boot_of(os.environ), notices_of_cloud(os.environ)
    except VcasgdError as error:
        log.error("%s", error)
        return 2
    with tempfile.TemporaryDirectory(prefix="vcasgd-") as folder:
        machine = BootProcess(boot, Path(folder) / "notice")
        signal.signal(signal.SIGTERM, lambda _number, _frame: machine.shut_down())
        _Watch("notices", lambda: machine.watch_notices(source)).start()
        if orphan_seconds := boot.env.get("VCASGD_ORPHAN_SECONDS"):
            storage = Storage(boot.env["VCASGD_STORAGE_URL"])
            seconds = float(orphan_seconds)
            _Watch("controller", lambda: machine.watch_controller(storage, seconds)).start()
        return machine.run()


if __name__ == "__main__":
    sys.exit(main())
