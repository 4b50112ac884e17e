"""Ray's processes of one machine: ``python -m vcasgd.cluster.start OPTIONS``.

Does what ``ray start --block`` does, with less; see :mod:`vcasgd.cluster.ray_node`. Workers start
as forks of a process that imports their modules while Ray starts (:mod:`vcasgd.fork_server`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vcasgd.cluster.commands import FORKS_VARIABLE, TLS_VARIABLE, own_address, use_tls
from vcasgd.fork_server import ForkServer, die_with, listen, preload, preloaded


def _options() -> argparse.Namespace:
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
    return parser.parse_args()


def main() -> NoReturn:
    """Start the processes, and end with them: with status 1 if one of them died."""
    given = _options()
    own = None if given.temp_dir else tempfile.mkdtemp(prefix="vcasgd-")
    folder = Path(own or given.temp_dir)
    # Forked first, because Ray starts threads.
    if given.preload:
        os.environ[FORKS_VARIABLE] = str(_serve_forks(given.preload, folder, own))
    if given.node_ip_address is None:
        given.node_ip_address = own_address(given.address)
    # Before Ray is imported, because it then reads the environment.
    if os.environ.pop(TLS_VARIABLE, None) == "1":
        use_tls(os.environ["RAY_AUTH_TOKEN"], given.node_ip_address, folder / "tls")

    from vcasgd.cluster.ray_node import run

    run(given)


def _serve_forks(modules: Sequence[str], folder: Path, own: str | None) -> Path:
    """Start the process that workers are forks of, and return its socket in ``folder``.

    It imports the modules while Ray starts, and removes the folder ``own`` at the end.
    """
    path = folder / "forks"
    path.unlink(missing_ok=True)
    listener = listen(path)
    parent = os.getpid()
    if not os.fork():
        _be_forks(listener, own, modules, parent)
    listener.close()
    return path


def _be_forks(
    listener: socket.socket, own: str | None, modules: Sequence[str], parent: int
) -> NoReturn:
    """Be the process that workers are forks of, until the parent ends."""
    signal.signal(signal.SIGTERM, lambda *_: _end_forks(own))
    # Not SIGKILL, because a parent that is killed can't remove the folder.
    die_with(parent, signal.SIGTERM)
    if preloaded() != tuple(modules):
        preload(modules)
    ForkServer(listener).serve()
    _end_forks(own)


def _end_forks(own: str | None) -> NoReturn:
    """End this process, and remove the folder of its socket if it is its own."""
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
