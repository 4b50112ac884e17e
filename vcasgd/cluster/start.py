"""Ray's processes of one machine: ``python -m vcasgd.cluster.start OPTIONS``.

Does what ``ray start --block`` does, with less; see :mod:`vcasgd.cluster.ray_node`. Workers start
as forks of a process that imports their modules while Ray starts (:mod:`vcasgd.fork_server`).
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vcasgd.cluster.commands import for_workers
from vcasgd.fork_server import ForkServer, die_with, listen, preload, preloaded


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m vcasgd.cluster.start")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--head", type=int, metavar="PORT", help="start the head on this port")
    role.add_argument("--address", metavar="HOST:PORT", help="join the cluster of this head")
    parser.add_argument("--node-ip-address", help="default: the one that reaches the head")
    parser.add_argument("--num-cpus", type=float, default=0.0)
    parser.add_argument("--num-gpus", type=float, default=0.0)
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--object-store-memory", type=int, required=True, metavar="BYTES")
    parser.add_argument("--temp-dir")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE")
    return parser.parse_args(arguments)


def main() -> NoReturn:
    """Start the processes, and end with them: with status 1 if one of them died."""
    given = options()
    # Forked first, because Ray starts threads.
    forks = _serve_forks(given)

    from vcasgd.cluster.ray_node import run

    run(given, forks)


def _serve_forks(given: argparse.Namespace) -> Path | None:
    """Start the process that workers are forks of, and return its socket.

    It imports the modules while Ray starts.
    """
    if not given.preload:
        return None
    path = Path(given.temp_dir or tempfile.mkdtemp(prefix="vcasgd-")) / "forks"
    path.unlink(missing_ok=True)
    listener = listen(path)
    parent = os.getpid()
    if os.fork():
        listener.close()
        return path
    die_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    modules = for_workers(given.preload)
    if preloaded() != modules:
        preload(modules)
    ForkServer(listener).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
