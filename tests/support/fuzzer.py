"""Random calls with every command and script that a worker's credentials allow, and with others.

Some of them are transactions, ask for other databases, repeat fields, never read the answer, or
never end. Lengths and numbers are at, just below, and far above the limits of the platform.
"""

from __future__ import annotations

import hashlib
import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from support.hostile import Hostile
from vcasgd import limits
from vcasgd.errors import StoreDenied, StoreError
from vcasgd.store.acl import LEDGER_SCRIPTS, TENSORS_SCRIPTS, Grant, ledger_user, tensors_user
from vcasgd.store.connection import RedisClient, script_source
from vcasgd.store.keys import CLEARANCES
from vcasgd.store.ledger.leases import Leases

NUMBERS = ["0", "1", "-1", "3", "63", "1e15", "-1e15", "1e308", "-0", "nan", "inf", "-inf", "0x1p9",
           "9" * 400, str(2**53), str(-(2**63)), "1.5", "00", "+inf", "1_0"]  # fmt: skip
JSON = ["{", "[]", "null", "5", "[" * 20_000, '{"a":' * 20_000, '{"at":1e999}', '"\\ud800"',
        '{"at":1' + "0" * 400 + "}", '{"samples":-1}', "NaN", '{"version":1,"metrics":{"a":NaN}}',
        '{"at":1,"kind":"k","text":"t","details":{"x":1e400}}']  # fmt: skip
TEXTS = ["", "*", "-", "+", "$", "x", "train:0", "train:-1", "evaluate:1", "initialise:0", "e", "l",
         "h", "facts", "next", "state", "running", "worker|1", "finished", "version", "token",
         "\x00", "ü", "a" * 5000, "%s%n", "MAXLEN", "LIMIT", "NX", "STREAMS", "COUNT",
         "inf|inf", "0-0", "18446744073709551615-18446744073709551615"]  # fmt: skip
BYTES = [b"\xff", b"\x80" * 300, b"x" * (1 << 20)]
#: Limits of lengths and numbers that a worker chooses.
LIMITS = sorted(
    value
    for name, value in vars(limits).items()
    if name.startswith("MAX_") and isinstance(value, int) and value <= limits.MAX_STRING_BYTES
)
#: Errors of a library that can't parse an answer.
UNREADABLE = (ValueError, TypeError, IndexError, KeyError, AttributeError)
#: Connections that are left open, without an end of their command or without a reader.
OPEN = 30
#: Part of the calls that are attacks on the server itself; many send megabytes.
ATTACKS = 0.03


class Fuzzer:
    """Makes random calls with the credentials of one worker."""

    def __init__(self, hostile: Hostile, seed: random.Random) -> None:
        self._random = seed
        self._hostile = hostile
        #: Calls that a server executed without an error.
        self.accepted = 0
        self._open: deque[socket.socket] = deque()
        ledger = ledger_user("", hostile.job).grants
        tensors = tensors_user("", hostile.job, hostile.name, first_snapshot=True).grants
        self._choices = [
            *((hostile.ledger, each, LEDGER_SCRIPTS) for each in ledger),
            *((hostile.tensors, each, TENSORS_SCRIPTS) for each in tensors),
        ]

    def call(self) -> bool:
        """Make a call; return False if the worker no longer has access to the ledger."""
        if self._random.random() < ATTACKS:
            # The server may close the connection.
            with suppress(StoreError, OSError, *UNREADABLE):
                self._random.choice(self._attacks)()
            return self._has_access()
        client, grant, scripts = self._random.choice(self._choices)
        try:
            client.execute_command(*self._words(grant, scripts))
            self.accepted += 1
        except StoreDenied:
            return client is self._hostile.tensors or self._has_access()
        except StoreError:
            pass
        except UNREADABLE:
            pass
        return True

    @property
    def _attacks(self) -> list[Callable[[], object]]:
        return [
            self._transact,
            self._select,
            self._hold,
            self._repeat_fields,
            self._leave_unread,
            self._leave_unfinished,
            self._request_pins,
        ]

    def _transact(self) -> None:
        """Send calls as one transaction."""
        client, grant, scripts = self._random.choice(self._choices)
        with client.pipeline(transaction=True) as pipe:
            for _ in range(self._random.randrange(1, 9)):
                pipe.execute_command(*self._words(grant, scripts))
            pipe.execute()

    def _select(self) -> None:
        self._random.choice((self._hostile.ledger, self._hostile.tensors)).execute_command(
            "SELECT", self._random.choice(("0", "1", "9", "15"))
        )

    def _hold(self) -> None:
        """Hold leases under a name that is as long as possible, and ask for one."""
        ledger, keys = self._hostile.ledger, self._hostile.keys
        holder = self._random.choice((b"|", b"|1", b"1|")) * 2
        length = self._length()
        for number in range(self._random.randrange(32)):
            ledger.hset(keys.holders, f"train:{number}", (holder * length)[:length])
            ledger.zadd(keys.leases, {f"train:{number}": self._random.choice((1, 1e15))})
        Leases(ledger, self._hostile.job, self._hostile.name, 10).acquire(idle=True)

    def _repeat_fields(self) -> None:
        client, key = self._place()
        self._write(client, "HSET", key, "1", b"x" * self._length())
        self._write(client, "HMGET", key, *["1"] * self._random.choice((2, 1000, 100_000)))

    def _leave_unread(self) -> None:
        """Request a long answer again and again, and read none."""
        client, key = self._place()
        self._write(client, "HSET", key, "1", b"x" * self._length())
        for _ in range(self._random.randrange(200)):
            self._write(client, "HGET", key, "1", again=True)

    def _leave_unfinished(self) -> None:
        """Leave a connection silent, or a command unfinished."""
        client, key = self._place()
        connection = self._connect(client)
        half = packed("HSET", key, "1", b"x" * self._length())
        for _ in range(self._random.randrange(3)):
            connection.sendall(half.replace(b"*4", b"*100000", 1)[: self._length()])

    def _request_pins(self) -> None:
        names = [f"{self._random.random()}" for _ in range(self._random.choice((1, 20, 20_000)))]
        self._hostile.tensors.sadd(self._hostile.tensor_keys.pin_requests, *names)

    def _place(self) -> tuple[RedisClient, str]:
        return self._random.choice(
            (
                (self._hostile.ledger, self._hostile.keys.counters),
                (self._hostile.tensors, self._hostile.tensor_keys.applied),
            )
        )

    def _length(self) -> int:
        length = self._random.choice(LIMITS) + self._random.choice((-1, 0, 1))
        return min(max(length, 0), limits.MAX_STRING_BYTES)

    def _write(self, client: RedisClient, *words: str | bytes, again: bool = False) -> None:
        """Send a command and don't read its answer; ``again``: on the last connection."""
        connection = self._open[-1] if again else self._connect(client)
        connection.sendall(packed(*words))

    def _connect(self, client: RedisClient) -> socket.socket:
        """Return a new connection that is signed in, unless chance leaves it a stranger."""
        kwargs = client.connection_pool.connection_kwargs
        connection = socket.create_connection((kwargs["host"], kwargs["port"]), timeout=1)
        self._open.append(connection)
        if len(self._open) > OPEN:
            self._open.popleft().close()
        if self._random.random() < 0.9:
            connection.sendall(packed("AUTH", kwargs["username"], kwargs["password"]))
        return connection

    def close(self) -> None:
        """Close the connections that were left open."""
        for connection in self._open:
            connection.close()

    def _has_access(self) -> bool:
        try:
            self._hostile.ledger.ping()
        except StoreDenied:
            return False
        except StoreError:
            pass  # The server closed the connection.
        return True

    def _words(self, grant: Grant, scripts: tuple[str, ...]) -> list[str | bytes]:
        command = self._random.choice(grant.commands.split())
        if command.startswith("evalsha"):
            return self._script(self._random.choice(scripts))
        key = self._key(self._random.choice(grant.keys))
        words: list[str | bytes] = [command, key, *self._arguments(self._random.randrange(6))]
        if command == "xadd" and self._random.random() < 0.7:
            field = "h" if key.endswith("updates") else key.rpartition(":")[2][0]
            words = [command, key, "*", field, self._argument()]
        if command == "xread":
            words = [command, "STREAMS", key, self._argument()]
        return words

    def _script(self, name: str) -> list[str | bytes]:
        digest = hashlib.sha1(script_source(name).encode()).hexdigest()
        keys = [self._named(each) for each in expected_keys(name)]
        if self._random.random() < 0.2:
            self._random.shuffle(keys)
        most = self._random.choice((3, 8, 200, 5000))
        arguments = self._arguments(self._random.randrange(most))
        return ["EVALSHA", digest, str(len(keys)), *keys, *arguments]

    def _named(self, name: str) -> str:
        if name == "clearances":
            return CLEARANCES
        ledger, tensors = self._hostile.keys, self._hostile.tensor_keys
        return f"{tensors.prefix}{name}" if name in TENSOR_NAMES else getattr(ledger, name)

    def _key(self, pattern: str) -> str:
        key = pattern.replace(f"{{{self._hostile.job}:*}}", f"{{{self._hostile.job}:0}}", 1)
        return key.replace("*", self._random.choice(("0", "0.0:0", "1.2:r0")))

    def _arguments(self, number: int) -> list[str | bytes]:
        return [self._argument() for _ in range(number)]

    def _argument(self) -> str | bytes:
        kinds: list[list[str] | list[bytes]] = [NUMBERS, TEXTS, JSON, BYTES, LENGTHS]
        (kind,) = self._random.choices(kinds, (45, 35, 17.5, 2, 0.5))
        return self._random.choice(kind)


#: Texts at the limits of short ones, and some at those of long ones.
LENGTHS = [
    character * (length + more)
    for length in LIMITS
    for more in (-1, 0, 1)
    for character in (b"|", b"1")
    if length + more <= 1 << 17
]


def packed(*words: str | bytes) -> bytes:
    """Return a command as a client sends it."""
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    head = b"*%d\r\n" % len(parts)
    return head + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


TENSOR_NAMES = ("meta", "applied", "pushed", "tokens", "updates", "push-slots", "window",
                "rejected", "fence", "news")  # fmt: skip


def expected_keys(script: str) -> list[str]:
    """Return the names of the keys that a script expects."""
    call = script_source(script).rpartition("expect_keys(")[2].partition(")")[0]
    return [each.strip(" '\n") for each in call.split(",")]
