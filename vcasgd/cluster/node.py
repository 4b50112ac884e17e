"""A Ray node on a machine that costs money: a dead-man's switch beside its command.

    python -m vcasgd.cluster.node COMMAND…

The command replaces this process. A second process ends the machine if no controller has given a
sign of life for ``VCASGD_ORPHAN_SECONDS``, because no other process would ever terminate it. For
that, it sends SIGTERM to the parent of this process (:mod:`vcasgd.fleet.machine.main`), which gives
notice to the worker, ends the command, and with itself the machine.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time

from vcasgd.errors import VcasgdError
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import load_settings
from vcasgd.steady_time import boot_time
from vcasgd.storage.life_sign import SIGNS, Silence, read_life_sign
from vcasgd.storage.objects import Storage

log = logging.getLogger(__name__)


def main() -> int:
    """Start the watch, and become the command."""
    argv = [sys.executable, "-m", "vcasgd.cluster.node", "--watch", str(os.getppid())]
    subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    os.execv(sys.argv[1], sys.argv[1:])


def watch(machine: int) -> int:
    """End the process ``machine`` after too long a silence, unless the node ends before."""
    configure_logging("machine")
    try:
        settings = load_settings()
        storage = Storage(settings.required("storage_url"))
    except VcasgdError as error:
        return exit_status(error)
    node, silence = os.getppid(), Silence(boot_time())
    while os.getppid() == node:
        seconds = silence.seconds(read_life_sign(storage), boot_time())
        if seconds >= settings.orphan_seconds:
            log.error("no sign of a controller for %.0f s: the machine ends", seconds)
            os.kill(machine, signal.SIGTERM)
            return 0
        time.sleep(settings.orphan_seconds / SIGNS / 2)
    return 0


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[2])) if sys.argv[1] == "--watch" else main())
