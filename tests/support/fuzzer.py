"""Random calls with every command and script that a worker's credentials allow."""

from __future__ import annotations

import hashlib
import random

from support.hostile import Hostile
from vcasgd.errors import StoreDenied, StoreError
from vcasgd.store.acl import LEDGER_SCRIPTS, TENSORS_SCRIPTS, Grant, ledger_user, tensors_user
from vcasgd.store.connection import script_source
from vcasgd.store.keys import CLEARANCES

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


class Fuzzer:
    """Makes random calls with the credentials of one worker."""

    def __init__(self, hostile: Hostile, seed: random.Random) -> None:
        self._random = seed
        self._hostile = hostile
        #: Calls that a server executed without an error.
        self.accepted = 0
        ledger = ledger_user("", hostile.job).grants
        tensors = tensors_user("", hostile.job, hostile.name, first_snapshot=True).grants
        self._choices = [
            *((hostile.ledger, each, LEDGER_SCRIPTS) for each in ledger),
            *((hostile.tensors, each, TENSORS_SCRIPTS) for each in tensors),
        ]

    def call(self) -> bool:
        """Make a call; return False if the worker no longer has access to the ledger."""
        client, grant, scripts = self._random.choice(self._choices)
        try:
            client.execute_command(*self._words(grant, scripts))
            self.accepted += 1
        except StoreDenied:
            return client is self._hostile.tensors or self._has_access()
        except StoreError:
            pass
        except (ValueError, TypeError, IndexError, KeyError, AttributeError):
            pass  # The library can't parse the answer.
        return True

    def _has_access(self) -> bool:
        try:
            self._hostile.ledger.ping()
        except StoreError:
            return False
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
        most = self._random.choice((3, 8, 200))
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
        kinds: list[list[str] | list[bytes]] = [NUMBERS, TEXTS, JSON, BYTES]
        (kind,) = self._random.choices(kinds, (45, 35, 18, 2))
        return self._random.choice(kind)


TENSOR_NAMES = ("meta", "applied", "pushed", "tokens", "updates", "places", "window", "rejected",
                "fence", "news")  # fmt: skip


def expected_keys(script: str) -> list[str]:
    """Return the names of the keys that a script expects."""
    call = script_source(script).rpartition("expect_keys(")[2].partition(")")[0]
    return [each.strip(" '\n") for each in call.split(",")]
