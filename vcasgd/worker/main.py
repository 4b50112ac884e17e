"""Entry points of the worker process."""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys

from vcasgd.errors import VcasgdError
from vcasgd.fleet.machine.notices import notices_from_environment
from vcasgd.fork_server import die_with
from vcasgd.logging import configure_logging, exit_status, identify
from vcasgd.settings import load_settings
from vcasgd.worker.gpus import choose_gpu
from vcasgd.worker.loop import Worker

#: Parameters of mallopt, from <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def run(job: str, worker: str, machine: str) -> None:
    """Work until the job has ended or the machine has to leave.

    Settings come from the environment.
    """
    configure_logging("worker")
    identify(job=job, worker=worker)
    keep_freed_memory()
    settings = load_settings()
    notices = notices_from_environment(settings.metadata)
    gpu = choose_gpu(worker)
    Worker(settings, job, worker, machine=machine, notices=notices, gpu=gpu).run()


def main() -> int:
    """Run a worker outside Ray; return 0 if it left in good order."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--machine", help="machine of the fleet, if it is one")
    parser.add_argument("--parent", type=int, help="process whose end kills this one")
    options = parser.parse_args()
    if options.parent is not None:
        die_with(options.parent)
    configure_logging("worker")
    identify(job=options.job, worker=options.worker)
    keep_freed_memory()
    try:
        settings = load_settings()
        notices = notices_from_environment(settings.metadata)
        worker = Worker(
            settings,
            options.job,
            options.worker,
            machine=options.machine,
            notices=notices,
            gpu=choose_gpu(options.worker),
        )
        signal.signal(signal.SIGTERM, lambda _number, _frame: worker.leave("SIGTERM"))
        worker.run()
    except VcasgdError as error:
        return exit_status(error)
    return 0


def keep_freed_memory() -> None:
    """Keep large freed blocks in the process, if its C library is glibc.

    By default, glibc returns each tensor of more than 32 MiB to the system when it is freed, and
    the next one has to be zeroed and mapped page by page. A worker frees and needs the same sizes
    all the time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


if __name__ == "__main__":
    sys.exit(main())
