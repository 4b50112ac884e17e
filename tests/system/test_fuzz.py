"""Every command and script that a worker may call, with random arguments, stops no other job."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

import pytest
from support.api_harness import Api
from support.harness import Harness
from support.hostile import Hostile, assert_everything_answers, platform, train_on
from support.servers import KINDS
from support.training import Training

from vcasgd.errors import StoreDenied, StoreError
from vcasgd.store.acl import LEDGER_SCRIPTS, TENSORS_SCRIPTS, Grant, ledger_user, tensors_user
from vcasgd.store.connection import script_source
from vcasgd.store.keys import CLEARANCES

pytestmark = pytest.mark.both_servers

#: Calls in ``make test``, and in ``make test-all``.
CALLS, MANY_CALLS = 2000, 20_000
#: Most calls of one job; it usually loses its access before.
CALLS_OF_A_JOB = 1500

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


@pytest.fixture(scope="module", params=KINDS)
def harness(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    with platform(tmp_path_factory.mktemp("fuzz"), request.param) as harness:
        yield harness


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


def fuzz(harness: Harness, calls: int, seed: int) -> None:
    api = Api(harness.home, harness.ledger).start()  # type: ignore[arg-type]
    chooser, made, accepted, jobs = random.Random(seed), 0, 0, []
    try:
        while made < calls:
            hostile = Hostile(harness, Training(harness).job)
            hostile.sign_in(tensors=True)
            fuzzer, own = Fuzzer(hostile, chooser), 0
            while own < CALLS_OF_A_JOB and fuzzer.call():
                own += 1
            made, accepted = made + own, accepted + fuzzer.accepted
            assert hostile.await_expulsion().reason
            hostile.close()
            jobs.append(hostile.job)
        assert accepted > calls / 10, "most calls are refused"
        victim = Training(harness)
        victim.add_workers(1)
        assert_everything_answers(api, [*jobs[-3:], victim.job])
        train_on(harness, victim)
        assert_everything_answers(api, [victim.job])
    finally:
        api.end()


def test_random_calls_of_a_worker_stop_no_other_job(harness: Harness) -> None:
    fuzz(harness, CALLS, seed=1)


@pytest.mark.extended
@pytest.mark.parametrize("seed", [2, 3])
def test_many_random_calls_of_a_worker_stop_no_other_job(harness: Harness, seed: int) -> None:
    fuzz(harness, MANY_CALLS, seed)
