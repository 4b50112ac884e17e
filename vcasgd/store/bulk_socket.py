"""One connection's socket, used directly: many megabytes to and from memory that is already there.

redis-py connects, signs in, speaks TLS and finds the primary; what it can't do is receive a
string into memory that is already there, or send a list of them in one system call.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from typing import Any

#: on one machine, what waits in a small send buffer is still in the processor's cache when it is
#: received (benchmarks/profile/)
LOCAL_SEND_BUFFER = 1 << 17
#: there is nothing to keep in a Unix socket but what waits: one that holds more sleeps less
UNIX_SEND_BUFFER = 1 << 22
#: room for what arrives while nobody is woken for it
LOCAL_RECEIVE_BUFFER = 1 << 21
#: after so many milliseconds without all that was expected, less is taken, too: a server that is
#: slow, or one whose answer is short because it is an error
GATHER_MS = 20


class BulkSocket:
    """A connection of redis-py's that carries bulk. Waits are bounded by its answer time.

    Methods raise :class:`OSError`; :class:`TimeoutError` and :class:`BlockingIOError` are for
    the answer time.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        # redis-py has no public way to a connection's socket
        self._sock: socket.socket = connection._sock
        self._seconds = self._sock.gettimeout()
        self._tls = isinstance(self._sock, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._gathers, self._least = False, 1
        if not self._tls:
            self._tune()

    @property
    def quiet(self) -> bool:
        """Nobody answers unasked: what can be read is the end, the server was restarted.

        Without a socket it was closed together with all others of its client.
        """
        if self.connection._sock is not self._sock:
            return False
        self._expect(1)
        return not self._poll.poll(0)

    def send(self, *parts: memoryview) -> None:
        """All of them, one behind the other."""
        if self._tls:
            for part in parts:  # TLS copies anyway, and its sockets know no vectors
                self._sock.sendall(part)
            return
        left = list(parts)
        while left:
            left = rest_of(left, self._sock.sendmsg(left))

    def receive(self, parts: list[memoryview], least: int = 1) -> int:
        """Some of what fits into the parts; returns how many bytes. On one machine nobody is
        woken before ``least`` bytes are there, or :data:`GATHER_MS` have passed."""
        if self._tls:
            count = self._sock.recv_into(parts[0])
        elif self._gathers:
            self._await(least)
            count = self._sock.recvmsg_into(parts, 0, socket.MSG_DONTWAIT)[0]
        else:
            count = self._sock.recvmsg_into(parts)[0]
        if not count:
            raise ConnectionResetError("the connection was closed")
        return count

    def _await(self, least: int) -> None:
        self._expect(least)
        if least > 1 and self._poll.poll(GATHER_MS):
            return
        self._expect(1)
        if not self._poll.poll(None if self._seconds is None else self._seconds * 1000):
            raise TimeoutError

    def _expect(self, least: int) -> None:
        if self._gathers and least != self._least:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def _tune(self) -> None:
        """Sizes for one machine; between machines the kernel finds better ones by itself."""
        sock, seconds = self._sock, self._seconds
        if seconds is not None:
            # Python asks before every call whether the socket is ready, unless the kernel does
            # the waiting
            bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER)
        elif sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_RECEIVE_BUFFER)
            self._gathers = True


def rest_of(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the parts behind their first ``count`` bytes."""
    for index, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[index + 1 :]]
        count -= part.nbytes
    return []
