"""Process of a worker: ``python -m vcasgd.worker.main --job JOB --worker NAME``.

Settings come from the environment.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
import traceback

from vcasgd.errors import VcasgdError
from vcasgd.fleet.notices import FileNotices
from vcasgd.fork_server import die_with
from vcasgd.local_files import temporary_folder
from vcasgd.logging import configure_logging, exit_status, identify
from vcasgd.printable import masked
from vcasgd.settings import load_settings
from vcasgd.worker.gpus import choose_gpu
from vcasgd.worker.loop import Worker

#: Parameters of mallopt, from <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def main() -> int:
    """Run a worker; return 0 if it left in good order."""
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
        with temporary_folder("vcasgd-worker-") as folder:
            worker = Worker(
                settings,
                options.job,
                options.worker,
                machine=options.machine,
                notices=FileNotices(settings.notice_file) if settings.notice_file else None,
                gpu=choose_gpu(options.worker),
                folder=folder,
            )
            signal.signal(signal.SIGTERM, lambda _number, _frame: worker.leave("SIGTERM"))
            worker.run()
    except VcasgdError as error:
        return exit_status(error)
    except Exception:  # noqa: BLE001 - as an interpreter does
        # Its log, and its end in the machine's report, show no secret of the job.
        sys.stderr.write(masked(traceback.format_exc()))
        return 1
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
