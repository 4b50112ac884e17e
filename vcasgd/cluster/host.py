"""Process of a worker."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import traceback
from typing import Any

from vcasgd.masking import masked


class Host:
    """Ray actor that runs a worker's entry point and exits when the entry point returns.

    The entry point runs in its own thread, so that Ray reports the worker as alive at once and can
    kill it at any time. The exit code is 0 when the entry point returns, 1 when it raises, and its
    argument when it calls ``sys.exit``.
    """

    def __init__(self, entry: str, arguments: dict[str, Any], env: dict[str, str]) -> None:
        # Set before the import of the entry point: libraries read their settings when they load.
        os.environ.update(env)
        threading.Thread(target=_run, args=(entry, arguments), name="entry", daemon=True).start()


def _run(entry: str, arguments: dict[str, Any]) -> None:
    code = 1
    try:
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(**arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - this thread has no caller
        sys.stderr.write(masked(traceback.format_exc()))
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
