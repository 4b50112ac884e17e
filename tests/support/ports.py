"""Ports that nobody else takes: no other process of the tests, no stack, no outgoing connection."""

from __future__ import annotations

import os
import random
import socket
from itertools import cycle

#: below those of stacks, which are below those that the kernel gives to outgoing connections: a
#: client that tries again must not sit on a server's port while the server is away
PORTS = range(10_000, 20_000)
#: processes of pytest that run beside one another
MOST_PROCESSES = 8


def _own() -> range:
    """Each process of pytest has ports of its own."""
    share = len(PORTS) // MOST_PROCESSES
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_PROCESSES
    return PORTS[number * share : (number + 1) * share]


def _from_somewhere(ports: range) -> list[int]:
    """Two runs of the tests at a time are not to begin with the same one."""
    start = random.randrange(len(ports))
    return [*ports[start:], *ports[:start]]


_NEXT = cycle(_from_somewhere(_own()))


def free_port() -> int:
    """One on which nobody listens, and which was not given out for a long time."""
    while not _is_free(port := next(_NEXT)):
        pass
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
