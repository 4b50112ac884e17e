"""Transfer of many megabytes between this process's memory and a server, without a Python copy.

redis-py connects, authenticates, speaks TLS, finds the primary, and keeps idle connections. It
can't receive a string into existing memory or send several buffers in one system call, so
:class:`BulkSocket` uses the connection's socket directly for ``SET`` and ``GET``, whose answers
have a known length.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vcasgd.errors import StoreUnavailable
from vcasgd.store.connection import RedisClient
from vcasgd.store.pipeline import error_of_reply, mapped_errors

#: Strings requested and not yet received: enough to keep the server busy, and the most that it
#: has to buffer for a slow reader.
DEPTH = 4
#: Strings after which the server's buffer is let run empty. Until then, Valkey counts all that it
#: has sent, by reference, against the limit for unread answers.
DRAINED_AFTER = 16
#: An error of the server is one short line; a longer one is cut off.
MAX_ERROR_LENGTH = 1 << 12
#: Bytes of the send buffer for TCP on one machine: data in a small one is still in the processor's
#: cache when it is received (benchmarks/profile/).
LOCAL_SEND_BUFFER = 1 << 17

#: Words of a command.
Command = Sequence[str | bytes | int]


class Missing(Exception):
    """A key does not exist. ``index`` counts the keys of the call."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class WrongLength(Exception):
    """A string's length differs from its target's, or the value is not a string."""

    def __init__(self, index: int, value: str) -> None:
        super().__init__(index, value)
        self.index = index
        self.value = value


class BulkTransfer:
    """Bulk reads and writes over connections of the client.

    Thread-safe: concurrent calls use different connections. A connection is not used again after
    an error. Every wait is bounded by the client's socket timeout. Methods raise
    :class:`StoreUnavailable`, :class:`~vcasgd.errors.StoreDenied`,
    :class:`~vcasgd.errors.StoreFull` and :class:`~vcasgd.errors.StoreError`.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def store(self, items: Iterable[tuple[str, memoryview]], *, expire: int | None = None) -> None:
        """Write strings, which expire after ``expire`` seconds.

        Each view is read when it is sent, so a generator may fill it just before.
        """
        with self._socket() as bulk_socket, mapped_errors():
            for _ in range(_send_strings(bulk_socket, items, expire)):
                bulk_socket.connection.read_response()

    def store_between(
        self,
        before: Command,
        items: Iterable[tuple[str, memoryview]],
        after: Callable[[], Command],
        *,
        expire: int,
    ) -> tuple[Any, Any]:
        """Write strings between two commands, in one round trip; return the answers to both.

        ``after`` is called once the strings are sent. Raises the first error among the answers, and
        ``NoScriptError`` if the server lacks a script.
        """
        with self._socket() as bulk_socket, mapped_errors():
            connection = bulk_socket.connection
            _send_command(bulk_socket, before)
            count = _send_strings(bulk_socket, items, expire)
            _send_command(bulk_socket, after())
            answers = [connection.read_response() for _ in range(count + 2)]
        return answers[0], answers[-1]

    def load(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Iterator[int]:
        """Receive each string into its target, and yield its index once it is complete.

        Raises :class:`Missing` and :class:`WrongLength`; the content of the targets is then
        undefined.
        """
        requests = [b"*2\r\n$3\r\nGET\r\n" + _bulk(key.encode()) for key in keys]
        with self._socket() as bulk_socket:
            bulk_socket.send(memoryview(b"".join(requests[:DEPTH])))
            for index, target in enumerate(targets):
                _receive_string(bulk_socket, index, target)
                self._client.count_bulk(target.nbytes)
                following = requests[_following(index)]
                if following:
                    bulk_socket.send(memoryview(b"".join(following)))
                yield index

    @contextmanager
    def _socket(self) -> Iterator[BulkSocket]:
        pool = self._client.connection_pool
        with mapped_errors():
            connection = pool.get_connection()
        reusable = False
        try:
            yield BulkSocket(connection)
            reusable = True
        except TimeoutError as error:
            raise StoreUnavailable("the store does not answer: it took too long") from error
        except OSError as error:
            raise StoreUnavailable(f"the store does not answer: {error}") from error
        finally:
            # After an early end of the exchange, answers may still arrive.
            if not reusable:
                connection.disconnect()
            pool.release(connection)


class BulkSocket:
    """The socket of a redis-py connection. Waits are bounded by its timeout.

    Methods raise :class:`OSError`.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        # redis-py has no public access to a connection's socket.
        self._sock: socket.socket = connection._sock
        self._tls = isinstance(self._sock, ssl.SSLSocket)
        if not self._tls and self._sock.family != socket.AF_UNIX and _is_local(self._sock):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER)

    def send(self, *parts: memoryview) -> None:
        if self._tls:
            for part in parts:  # TLS copies anyway, and its sockets have no sendmsg.
                self._sock.sendall(part)
            return
        remaining = list(parts)
        while remaining:
            remaining = _after(remaining, self._sock.sendmsg(remaining))

    def receive(self, parts: list[memoryview]) -> int:
        """Receive into the parts, and return the number of bytes, at least 1."""
        sock = self._sock
        count = sock.recv_into(parts[0]) if self._tls else sock.recvmsg_into(parts)[0]
        if not count:
            raise ConnectionResetError("the connection was closed")
        return count


def _is_local(sock: socket.socket) -> bool:
    """Return True if a connection by TCP leads to this machine."""
    local: bool = sock.getpeername()[0] == sock.getsockname()[0]
    return local


def _following(index: int) -> slice:
    """Return the strings to request once the one at ``index`` is received."""
    if (index + 1) % DRAINED_AFTER == 0:
        return slice(index + 1, index + 1 + DEPTH)
    drained = index - index % DRAINED_AFTER + DRAINED_AFTER
    return slice(index + DEPTH, min(index + DEPTH + 1, drained))


def _send_strings(
    bulk_socket: BulkSocket, items: Iterable[tuple[str, memoryview]], expire: int | None
) -> int:
    """Send ``SET`` for each item, and return their number."""
    option = b"$2\r\nEX\r\n" + _bulk(b"%d" % expire) if expire is not None else b""
    command = b"*%d\r\n$3\r\nSET\r\n" % (5 if option else 3)
    count = 0
    for key, value in items:
        head = command + _bulk(key.encode()) + b"$%d\r\n" % value.nbytes
        bulk_socket.send(memoryview(head), value, memoryview(b"\r\n" + option))
        count += 1
    return count


def _send_command(bulk_socket: BulkSocket, command: Command) -> None:
    parts = bulk_socket.connection.pack_command(*command)
    bulk_socket.send(*(memoryview(part) for part in parts))


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def _receive_string(bulk_socket: BulkSocket, index: int, target: memoryview) -> None:
    """Receive a string of exactly the target's length.

    The bytes before and after it are known, so one call can receive all three.
    """
    head = b"$%d\r\n" % target.nbytes
    frame = memoryview(bytearray(len(head) + 2))
    parts = [frame[: len(head)], target, frame[len(head) :]]
    received = 0
    while parts:
        count = bulk_socket.receive(parts)
        parts, before, received = _after(parts, count), received, received + count
        seen = min(received, len(head))
        if before < len(head) and frame[:seen] != head[:seen]:
            start = b"".join((frame[: len(head)], target, frame[len(head) :]))[:received]
            raise _error_of_answer(index, _first_line(bulk_socket, start))


def _error_of_answer(index: int, answer: bytes) -> Exception:
    if answer == b"$-1":
        return Missing(index)
    if answer.startswith(b"-WRONGTYPE"):
        return WrongLength(index, "not a string")
    if answer.startswith(b"-"):
        return error_of_reply(answer[1:])
    return WrongLength(index, f"{answer[1:].decode(errors='replace')} bytes")


def _first_line(bulk_socket: BulkSocket, start: bytes) -> bytes:
    """Return the line of text that begins with ``start``, without its line break."""
    text = bytearray(start)
    while b"\r\n" not in text and len(text) < MAX_ERROR_LENGTH:
        rest = bytearray(MAX_ERROR_LENGTH)
        text += rest[: bulk_socket.receive([memoryview(rest)])]
    return bytes(text).partition(b"\r\n")[0]


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what follows the first ``count`` bytes of the parts."""
    for index, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[index + 1 :]]
        count -= part.nbytes
    return []
