"""Ports that no other test process, stack, or outgoing connection uses."""

from __future__ import annotations

import os
import random
import socket
from itertools import cycle

#: Below the ports of stacks, which are below those of outgoing connections: a client that
#: reconnects must not occupy a server's port while the server is down.
PORTS = range(10_000, 20_000)
#: Largest number of pytest processes at a time.
MAX_PROCESSES = 8


def _own_ports() -> range:
    """Return the ports of this pytest process."""
    share = len(PORTS) // MAX_PROCESSES
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MAX_PROCESSES
    return PORTS[number * share : (number + 1) * share]


def _rotated(ports: range) -> list[int]:
    """Start the list at a random port, so that two test runs start with different ones."""
    start = random.randrange(len(ports))
    return [*ports[start:], *ports[:start]]


_NEXT = cycle(_rotated(_own_ports()))


def free_port() -> int:
    """Return a port without a listener that has not been returned for a long time."""
    while not _is_free(port := next(_NEXT)):
        pass
    return port


def listens(port: int) -> bool:
    """Return True if a process of this computer accepts connections to a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
