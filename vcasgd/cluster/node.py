"""A Ray node on a machine that costs money: a watch beside its command.

    python -m vcasgd.cluster.node COMMAND…

The command replaces this process. A second process ends the machine if no controller has given a
sign of life for ``VCASGD_ORPHAN_SECONDS``, because no other process would ever terminate it. For
that, it sends SIGTERM to the parent of this process (:mod:`vcasgd.fleet.machine.main`), which gives
notice to the worker, ends the command, and with itself the machine.

The second process also polls for an eviction notice and publishes it, because a machine without a
worker, such as a spare one, has no other process that would.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

from vcasgd.cluster.commands import MACHINE_LABEL, START
from vcasgd.cluster.notices import PUBLISH_SECONDS, publish
from vcasgd.cluster.start import options
from vcasgd.errors import VcasgdError
from vcasgd.fleet.machine.notices import NoticeSource, notices_from_environment
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import load_settings
from vcasgd.steady_time import boot_time
from vcasgd.storage.life_sign import SIGNS, Silence, read_life_sign
from vcasgd.storage.objects import Storage

log = logging.getLogger(__name__)

#: Seconds between two polls for a notice. AWS recommends five, and gives two minutes.
POLL_SECONDS = 2.0


def main() -> int:
    """Start the watch, and become the command."""
    argv = [sys.executable, "-m", "vcasgd.cluster.node", "--watch", str(os.getppid())]
    subprocess.Popen([*argv, *sys.argv[1:]], stdin=subprocess.DEVNULL)
    os.execv(sys.argv[1], sys.argv[1:])


def watch(machine: int, command: list[str]) -> int:
    """End the process ``machine`` after too long a silence, unless the node ends before.

    Meanwhile, publish the notices of the node that ``command`` starts.
    """
    configure_logging("machine")
    try:
        settings = load_settings()
        storage = Storage(settings.required("storage_url"))
    except VcasgdError as error:
        return exit_status(error)
    if START in command:
        given = options(command[command.index(START) + 1 :])
        labels = dict(label.split("=", 1) for label in given.label)
        arguments = given.address, labels[MACHINE_LABEL], notices_from_environment(os.environ)
        threading.Thread(target=publish_notices, args=arguments, daemon=True).start()
    node, silence = os.getppid(), Silence(boot_time())
    while os.getppid() == node:
        seconds = silence.seconds(read_life_sign(storage), boot_time())
        if seconds >= settings.orphan_seconds:
            log.error("no sign of a controller for %.0f s: the machine ends", seconds)
            os.kill(machine, signal.SIGTERM)
            return 0
        time.sleep(settings.orphan_seconds / SIGNS / 2)
    return 0


def publish_notices(address: str, machine: str, source: NoticeSource) -> None:
    """Publish each new notice for a machine, and again what still holds, until the process ends."""
    last: str | None = None
    published_at = 0.0
    while True:
        try:
            notice, now = source.poll(), time.monotonic()
            if notice is not None and (
                notice.kind != last or now - published_at >= PUBLISH_SECONDS
            ):
                publish(address, machine, notice)
                log.warning("notice of eviction: %s", notice)
                last, published_at = notice.kind, now
        except Exception:
            # A notice is only a hint, and Ray's head may be away for a moment.
            log.exception("publish a notice of eviction")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[2]), sys.argv[3:]) if sys.argv[1] == "--watch" else main())
