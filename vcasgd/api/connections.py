"""Connections whose clients have to send their requests, and read the responses, in time.

uvicorn bounds neither: a client that connects and stays silent, or that reads nothing, would
occupy its connection indefinitely.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from http import HTTPStatus

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vcasgd.api.callers import CALLER_KEY
from vcasgd.limits import (
    MAX_CONNECTIONS,
    MAX_HEAD_SECONDS,
    MAX_UNREAD_SECONDS,
    MAX_UNSENT_BYTES,
    MIN_READ_BYTES,
)

log = logging.getLogger(__name__)

#: Files that are no connections of clients: those of the ledger, of the storage, of threads.
OTHER_FILES = 200
#: Calls of :meth:`uvicorn.Server.on_tick` in a second.
TICKS_PER_SECOND = 10
_FULL = HTTPStatus.SERVICE_UNAVAILABLE
_REFUSAL = (
    f"HTTP/1.1 {_FULL.value} {_FULL.phrase}\r\nRetry-After: 1\r\nConnection: close\r\n"
    "Content-Length: 0\r\n\r\n"
).encode()


class BoundedConnection(H11Protocol):
    """A connection that ends when its client is too slow, or when a newer client needs its place.

    Only requests with a valid token or sign-in keep their places: a visitor can take them from
    other visitors only.
    """

    #: Seconds for the head of a request, and for :data:`MIN_READ_BYTES` that wait to be read.
    head_timeout, unread_timeout = MAX_HEAD_SECONDS, MAX_UNREAD_SECONDS

    #: When the connection was made, or the head of its last request arrived.
    _since = 0.0
    #: Since when the head of a request is incomplete; None while none is awaited.
    _head_since: float | None = None
    #: Bytes that the client has not taken, when it last took enough of them.
    _unread, _unread_since = 0, 0.0

    @property
    def keeps_its_place(self) -> bool:
        """True while a request with a valid token or sign-in is in progress."""
        return self._is_busy and CALLER_KEY in self.scope

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, if necessary that of the oldest connection without a token."""
        super().connection_made(transport)
        self._since = self._head_since = self._unread_since = self.loop.time()
        _bound_kernel_buffer(transport)
        if len(self.connections) > max_connections() and not self._replace_another():
            transport.write(_REFUSAL)
            transport.close()

    def _replace_another(self) -> bool:
        others = [
            connection
            for connection in self.connections
            if isinstance(connection, BoundedConnection)
            and connection is not self
            and not connection.keeps_its_place
        ]
        if not others:
            return False
        oldest = min(others, key=lambda each: each._since)
        oldest.end()
        return True

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._since = self.loop.time()
        if self._is_busy:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self.loop.time()

    def end_if_slow(self, now: float) -> None:
        """End the connection if its client has not sent or read enough for too long."""
        unread = self.transport.get_write_buffer_size()
        # more than before: all that was there has been read, and the next part was written
        if not unread or unread > self._unread or self._unread - unread >= MIN_READ_BYTES:
            self._unread, self._unread_since = unread, now
        silent = self._head_since is not None and now - self._head_since > self.head_timeout
        if silent or now - self._unread_since > self.unread_timeout:
            self.end()

    def end(self) -> None:
        """End the connection at once, without waiting until the client has read what is sent."""
        self.connections.discard(self)
        self.transport.abort()


class BoundedServer(uvicorn.Server):
    """A server that looks for slow clients once a second."""

    async def on_tick(self, counter: int) -> bool:
        """End slow connections; return True if the server has to stop."""
        if counter % TICKS_PER_SECOND == 0:
            now = asyncio.get_running_loop().time()
            for each in tuple(self.server_state.connections):
                if isinstance(each, BoundedConnection):
                    each.end_if_slow(now)
        return await super().on_tick(counter)


def max_connections() -> int:
    """Return the number of connections that this process accepts at a time."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - OTHER_FILES))


def _bound_kernel_buffer(transport: asyncio.Transport) -> None:
    """Keep what a client does not read from filling the memory of the kernel."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
