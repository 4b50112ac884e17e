"""Many megabytes between this process's memory and a server, without a copy in Python.

The bulk of an update goes over connections of its own (:mod:`vcasgd.store.bulk_socket`). Only two
commands are spoken here, ``SET`` and ``GET``, whose answers have a known length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from vcasgd.errors import StoreUnavailable
from vcasgd.store.bulk_socket import BulkSocket, rest_of
from vcasgd.store.connection import RedisClient, error_of_reply, mapped_errors

#: strings asked for and not yet received: enough to keep the server busy, and all that it has
#: to hold for a reader that is slow
DEPTH = 4
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


class BulkTransfer:
    """Bulk over connections of its own, kept by the client; a new one after any error.

    Thread-safe: calls at the same time have different connections. Every wait is bounded by
    the answer time of the client. Methods raise :class:`StoreUnavailable`,
    :class:`~vcasgd.errors.StoreDenied`, :class:`~vcasgd.errors.StoreFull` and
    :class:`~vcasgd.errors.StoreError`.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def store(self, items: Iterable[tuple[str, memoryview]], *, expire: int | None = None) -> None:
        """Writes strings; each view is read when its turn comes, so a generator may fill it
        only then. ``expire`` in seconds."""
        option = b"$2\r\nEX\r\n" + _bulk(b"%d" % expire) if expire is not None else b""
        words = b"*%d\r\n$3\r\nSET\r\n" % (5 if option else 3)
        with self._line() as line:
            count = 0
            for key, value in items:
                head = words + _bulk(key.encode()) + b"$%d\r\n" % value.nbytes
                line.send(memoryview(head), value, memoryview(b"\r\n" + option))
                count += 1
            _receive_oks(line, count)

    def load(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Iterator[int]:
        """Receives each string into its target, and yields its index once it is there.

        Raises :class:`Missing` and :class:`WrongLength`; targets hold anything then.
        """
        requests = [b"*2\r\n$3\r\nGET\r\n" + _bulk(key.encode()) for key in keys]
        with self._line() as line:
            line.send(memoryview(b"".join(requests[:DEPTH])))
            for index, target in enumerate(targets):
                _receive_string(line, index, target)
                if index + DEPTH < len(requests):
                    line.send(memoryview(requests[index + DEPTH]))
                yield index

    @contextmanager
    def _line(self) -> Iterator[BulkSocket]:
        line, sound = self._connected(), False
        try:
            yield line
        except (TimeoutError, BlockingIOError) as error:
            raise StoreUnavailable("the store does not answer: it took too long") from error
        except OSError as error:
            raise StoreUnavailable(f"the store does not answer: {error}") from error
        else:
            sound = True
            self._client.idle_bulk.append(line)
        finally:
            # whatever ended the exchange early left answers on their way
            if not sound:
                self._discard(line)

    def _connected(self) -> BulkSocket:
        with suppress(IndexError):
            while True:
                line: BulkSocket = self._client.idle_bulk.pop()
                if self._client.serves(line.connection) and line.quiet:
                    return line
                self._discard(line)
        with mapped_errors():
            return BulkSocket(self._client.connection_pool.get_connection())

    def _discard(self, line: BulkSocket) -> None:
        line.connection.disconnect()
        self._client.connection_pool.release(line.connection)


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def _receive_oks(line: BulkSocket, count: int) -> None:
    """The answers to ``SET``; the first one that is an error is raised."""
    answers = bytearray(len(_OK) * count)
    expected = _OK * count
    received = 0
    while received < len(answers):
        received += line.receive([memoryview(answers)[received:]])
        if answers[:received] != expected[:received]:
            texts = bytes(answers[:received]).split(b"\r\n")
            at = next(index for index, text in enumerate(texts) if text[:1] not in (b"+", b""))
            raise error_of_reply(_first_line(line, b"\r\n".join(texts[at:]))[1:])


def _receive_string(line: BulkSocket, index: int, target: memoryview) -> None:
    """A string of exactly the target's length: with what comes before and after it known, all
    three are received by one call."""
    head = b"$%d\r\n" % target.nbytes
    around = memoryview(bytearray(len(head) + 2))
    parts = [around[: len(head)], target, around[len(head) :]]
    received, total = 0, target.nbytes + around.nbytes
    while parts:
        count = line.receive(parts, total - received)
        parts, before, received = rest_of(parts, count), received, received + count
        seen = min(received, len(head))
        if before < len(head) and around[:seen] != head[:seen]:
            began = b"".join((around[: len(head)], target, around[len(head) :]))[:received]
            raise _refusal(index, _first_line(line, began))


def _refusal(index: int, answer: bytes) -> Exception:
    if answer == b"$-1":
        return Missing(index)
    if answer.startswith(b"-WRONGTYPE"):
        return WrongLength(index, "something that is no string")
    if answer.startswith(b"-"):
        return error_of_reply(answer[1:])
    return WrongLength(index, f"{answer[1:].decode(errors='replace')} bytes")


def _first_line(line: BulkSocket, start: bytes) -> bytes:
    """The line of text that begins with ``start``, without its end."""
    text = bytearray(start)
    while b"\r\n" not in text and len(text) < LONGEST_ERROR:
        rest = bytearray(LONGEST_ERROR)
        text += rest[: line.receive([memoryview(rest)])]
    return bytes(text).partition(b"\r\n")[0]
