"""A worker's process."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import traceback
from typing import Any


class Host:
    """A worker's process, as Ray starts it: runs the entry, and ends when the entry does.

    The entry runs in a thread of its own, so that Ray sees the worker as up at once and can
    kill it at any time. Exit code: 0 when the entry returns, 1 when it raises, its own when
    it calls ``sys.exit``.
    """

    def __init__(self, entry: str, arguments: dict[str, Any], env: dict[str, str]) -> None:
        # before the entry is imported: libraries read their settings when they are loaded
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
    except BaseException:  # noqa: BLE001 - nobody is left to raise it to
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
