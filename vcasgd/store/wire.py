"""Many megabytes between this process's memory and a server, without a copy in Python.

redis-py connects, signs in, speaks TLS and finds the primary; what it can't do is receive a
string into memory that is already there, or send a list of them in one system call. So the
bulk of an update goes over a connection of its own, whose socket is used directly. Only two
commands are spoken here, ``SET`` and ``GET``, whose answers have a known length.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from vcasgd.errors import StoreUnavailable
from vcasgd.store.connection import Client, error_of_reply, mapped_errors

#: strings asked for and not yet received: enough to keep the server busy, and all that it has
#: to hold for a reader that is slow
DEPTH = 4
#: on one machine, what waits in a small send buffer is still in the processor's cache when it is
#: received: 5.1 GB/s instead of 4.6 (benchmarks/profile/)
LOCAL_SEND_BUFFER = 1 << 17
#: there is nothing to keep in a Unix socket but what waits: one that holds more sleeps less
UNIX_SEND_BUFFER = 1 << 22
#: receiving is the other way round, fewer and larger system calls: 5.2 GB/s instead of 3.0
LOCAL_RECEIVE_BUFFER = 1 << 21
#: an error of the server is one line, and not a long one
LONGEST_ERROR = 1 << 12
_OK = b"+OK\r\n"


class Missing(Exception):
    """A key is not there. ``index`` counts the keys of the call."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class WrongLength(Exception):
    """The string under a key is shorter or longer than the memory that it should fill, or is
    no string at all."""

    def __init__(self, index: int, found: str) -> None:
        super().__init__(index, found)
        self.index = index
        self.found = found


class Wire:
    """Bulk over connections of its own, kept by the client; a new one after any error.

    Thread-safe: calls at the same time have different connections. Every wait is bounded by
    the answer time of the client. Methods raise :class:`StoreUnavailable`,
    :class:`~vcasgd.errors.StoreDenied`, :class:`~vcasgd.errors.StoreFull` and
    :class:`~vcasgd.errors.StoreError`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def store(self, items: Iterable[tuple[str, memoryview]], *, expire: int | None = None) -> None:
        """Writes strings; each view is read when its turn comes, so a generator may fill it
        only then. ``expire`` in seconds."""
        option = b"$2\r\nEX\r\n" + _bulk(b"%d" % expire) if expire is not None else b""
        words = b"*%d\r\n$3\r\nSET\r\n" % (5 if option else 3)
        with self._socket() as sock:
            count = 0
            for key, value in items:
                head = words + _bulk(key.encode()) + b"$%d\r\n" % value.nbytes
                _send(sock, [memoryview(head), value, memoryview(b"\r\n" + option)])
                count += 1
            _receive_oks(sock, count)

    def load(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Iterator[int]:
        """Receives each string into its target, and yields its index once it is there.

        Raises :class:`Missing` and :class:`WrongLength`; targets hold anything then.
        """
        requests = [b"*2\r\n$3\r\nGET\r\n" + _bulk(key.encode()) for key in keys]
        with self._socket() as sock:
            _send(sock, [memoryview(b"".join(requests[:DEPTH]))])
            for index, target in enumerate(targets):
                _receive_string(sock, index, target)
                if index + DEPTH < len(requests):
                    _send(sock, [memoryview(requests[index + DEPTH])])
                yield index

    @contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        connection = self._connected()
        try:
            # redis-py has no public way to a connection's socket
            yield connection._sock
        except (TimeoutError, BlockingIOError) as error:
            raise StoreUnavailable("the store does not answer: it took too long") from error
        except OSError as error:
            raise StoreUnavailable(f"the store does not answer: {error}") from error
        else:
            self._client.idle_bulk.append(connection)
            connection = None
        finally:
            # whatever ended the exchange early left answers on their way
            if connection is not None:
                self._discard(connection)

    def _connected(self) -> Any:
        with suppress(IndexError):
            while True:
                connection = self._client.idle_bulk.pop()
                # without a socket: it was closed together with all of the client's
                if (
                    connection._sock is not None
                    and self._client.serves(connection)
                    and _is_quiet(connection._sock)
                ):
                    return connection
                self._discard(connection)
        with mapped_errors():
            connection = self._client.connection_pool.get_connection()
        _tune(connection._sock)
        return connection

    def _discard(self, connection: Any) -> None:
        connection.disconnect()
        self._client.connection_pool.release(connection)


def _is_quiet(sock: socket.socket) -> bool:
    """Nobody answers unasked: what can be read is the end, the server was restarted."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)


def _tune(sock: socket.socket) -> None:
    """Sizes for one machine; between machines the kernel finds better ones by itself."""
    seconds = sock.gettimeout()
    if seconds is not None and not isinstance(sock, ssl.SSLSocket):
        # Python asks before every call whether the socket is ready, unless the kernel does the
        # waiting
        bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER)
    elif sock.getpeername()[0] == sock.getsockname()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_RECEIVE_BUFFER)


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def _send(sock: socket.socket, parts: list[memoryview]) -> None:
    if isinstance(sock, ssl.SSLSocket):
        for part in parts:  # TLS copies anyway, and its sockets know no vectors
            sock.sendall(part)
        return
    while parts:
        parts = _rest(parts, sock.sendmsg(parts))


def _receive(sock: socket.socket, parts: list[memoryview]) -> int:
    """Some of what fits into the parts; returns how many bytes."""
    if isinstance(sock, ssl.SSLSocket):
        count = sock.recv_into(parts[0])
    else:
        count = sock.recvmsg_into(parts)[0]
    if not count:
        raise ConnectionResetError("the connection was closed")
    return count


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the parts behind their first ``count`` bytes."""
    for index, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[index + 1 :]]
        count -= part.nbytes
    return []


def _receive_oks(sock: socket.socket, count: int) -> None:
    """The answers to ``SET``; the first one that is an error is raised."""
    answers = bytearray(len(_OK) * count)
    expected = _OK * count
    received = 0
    while received < len(answers):
        received += _receive(sock, [memoryview(answers)[received:]])
        if answers[:received] != expected[:received]:
            lines = bytes(answers[:received]).split(b"\r\n")
            at = next(index for index, line in enumerate(lines) if line[:1] not in (b"+", b""))
            raise error_of_reply(_line(sock, b"\r\n".join(lines[at:]))[1:])


def _receive_string(sock: socket.socket, index: int, target: memoryview) -> None:
    """A string of exactly the target's length: with what comes before and after it known, all
    three are received by one call."""
    head = b"$%d\r\n" % target.nbytes
    around = memoryview(bytearray(len(head) + 2))
    parts = [around[: len(head)], target, around[len(head) :]]
    received = 0
    while parts:
        count = _receive(sock, parts)
        parts, before, received = _rest(parts, count), received, received + count
        seen = min(received, len(head))
        if before < len(head) and around[:seen] != head[:seen]:
            began = b"".join((around[: len(head)], target, around[len(head) :]))[:received]
            raise _refusal(index, _line(sock, began))


def _refusal(index: int, line: bytes) -> Exception:
    if line == b"$-1":
        return Missing(index)
    if line.startswith(b"-WRONGTYPE"):
        return WrongLength(index, "something that is no string")
    if line.startswith(b"-"):
        return error_of_reply(line[1:])
    return WrongLength(index, f"{line[1:].decode(errors='replace')} bytes")


def _line(sock: socket.socket, start: bytes) -> bytes:
    """The line that begins with ``start``, without its end."""
    text = bytearray(start)
    while b"\r\n" not in text and len(text) < LONGEST_ERROR:
        rest = bytearray(LONGEST_ERROR)
        text += rest[: _receive(sock, [memoryview(rest)])]
    return bytes(text).partition(b"\r\n")[0]
