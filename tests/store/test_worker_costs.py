"""Costs of a worker for a server, on real servers with the limits of ours."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.fuzzer import expected_keys, packed
from support.harness import RedisServer
from support.servers import KINDS, require_binary
from support.waiting import PATIENCE, await_truth

from vcasgd.limits import (
    MAX_CLIENTS_PERCENT,
    MAX_CONTENT_BYTES,
    MAX_ENTRIES,
    MAX_SHARE_BESIDE_OTHERS,
    MAX_STRING_BYTES,
)
from vcasgd.store import quotas
from vcasgd.store.acl import (
    LEDGER_SCRIPTS,
    TENSORS_SCRIPTS,
    AclUsers,
    User,
    ledger_user,
    tensors_user,
)
from vcasgd.store.connection import RedisClient, connect, script_source
from vcasgd.store.keys import CLEARANCES, LedgerKeys, TensorKeys
from vcasgd.store.ledger.leases import Leases, Wait
from vcasgd.store.quotas import ContentQuota, MemoryQuota

pytestmark = pytest.mark.both_servers

JOB, OTHER, WORKER, SECRET = "job-abc234", "other-abc234", "w-1", "a secret"
LEDGER_KEYS, TENSOR_KEYS = LedgerKeys(JOB), TensorKeys(JOB)
#: Memory of the server, and of all its connections.
LIMIT = 256 << 20
CLIENTS = LIMIT * MAX_CLIENTS_PERCENT // 100
#: Microseconds of the server that no call of a worker takes; before there were limits, seconds.
LONG = 500_000


@pytest.fixture(scope="module", params=KINDS)
def limited(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    server = RedisServer(
        tmp_path_factory.mktemp("limited"),
        durable=False,
        binary=require_binary(request.param),
        more=(f"maxmemory {LIMIT}", f"maxmemory-clients {MAX_CLIENTS_PERCENT}%"),
    )
    yield server
    server.end()


@pytest.fixture
def admin(limited: RedisServer) -> RedisClient:
    admin = limited.connection
    admin.flushall()
    admin.config_resetstat()
    admin.execute_command("MEMORY PURGE")
    users = [ledger_user(SECRET, JOB), tensors_user(SECRET, JOB, WORKER)]
    AclUsers(admin, LEDGER_SCRIPTS + TENSORS_SCRIPTS, 0).sync(users)
    return admin


@pytest.fixture
def worker(admin: RedisClient, limited: RedisServer) -> Iterator[RedisClient]:
    client = connect(ledger_user(SECRET, JOB).url(limited.url))
    yield client
    client.close()


@pytest.fixture
def sockets(limited: RedisServer) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def signed_in(limited: RedisServer, user: User, stack: ExitStack) -> socket.socket:
    """Return a connection of a worker that reads nothing unless the test does."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", limited.files.port)))
    connection.settimeout(PATIENCE)
    connection.sendall(packed("AUTH", user.name, user.password))
    assert connection.recv(100) == b"+OK\r\n"
    return connection


def send_often(connection: socket.socket, data: bytes, times: int) -> None:
    for _ in range(times):
        connection.sendall(data)


def cpu_of(admin: RedisClient) -> float:
    """Return the microseconds of processors that the server has used."""
    used = admin.info("cpu")
    return 1e6 * (used["used_cpu_user"] + used["used_cpu_sys"])


def longest_call(admin: RedisClient, before: float) -> float:
    """Return the most microseconds that a kind of command took on average.

    It took no more than all calls used of processors after ``before``, however busy these are.
    """
    stats, used = admin.info("commandstats"), cpu_of(admin) - before
    return min(used, max(float(each["usec_per_call"]) for each in stats.values()))


def test_long_holders_block_nobody(worker: RedisClient, admin: RedisClient) -> None:
    # Given leases whose holders are megabytes of what a pattern could try in many ways
    admin.hset(LEDGER_KEYS.record, "state", "running")
    admin.hset(LEDGER_KEYS.work, mapping={"total": 1, "per_epoch": 1, "finished": 0, "lead": 0})
    admin.hset(LEDGER_KEYS.counters, "next", 1)
    for number in range(31):
        worker.hset(LEDGER_KEYS.holders, f"train:{number}", b"|" * MAX_STRING_BYTES)
        worker.zadd(LEDGER_KEYS.leases, {f"train:{number}": 1e15})
    admin.config_resetstat()
    before = cpu_of(admin)

    answer = Leases(worker, JOB, WORKER, 60).acquire()

    assert isinstance(answer, Wait)
    assert longest_call(admin, before) < LONG


def test_long_work_items_are_removed_one_by_one(worker: RedisClient, admin: RedisClient) -> None:
    admin.hset(LEDGER_KEYS.record, "state", "running")
    admin.hset(LEDGER_KEYS.work, mapping={"total": 9, "per_epoch": 9, "finished": 0, "lead": 0})
    long = {b"train:%d" % each + b"1" * (MAX_STRING_BYTES - 100): 0 for each in range(10)}
    for item in long:
        worker.zadd(LEDGER_KEYS.leases, {item: 1})
        worker.zadd(LEDGER_KEYS.open, {item: 1})
    leases = Leases(worker, JOB, WORKER, 60)
    before, cpu_before = admin.info("memory")["used_memory"], cpu_of(admin)

    for _ in long:
        leases.acquire()

    assert longest_call(admin, cpu_before) < LONG
    assert not admin.zcount(LEDGER_KEYS.leases, "-inf", 1)
    assert not admin.exists(LEDGER_KEYS.open)
    assert admin.info("memory")["used_memory"] < before


@pytest.mark.parametrize("script", LEDGER_SCRIPTS + TENSORS_SCRIPTS)
def test_a_script_refuses_many_and_long_arguments(
    script: str, admin: RedisClient, limited: RedisServer
) -> None:
    ledger = script in LEDGER_SCRIPTS
    user = ledger_user(SECRET, JOB) if ledger else tensors_user(SECRET, JOB, WORKER)
    digest = hashlib.sha1(script_source(script).encode()).hexdigest()
    prefix = LEDGER_KEYS.record.removesuffix("record") if ledger else TENSOR_KEYS.prefix
    keys = [CLEARANCES if k == "clearances" else prefix + k for k in expected_keys(script)]
    if script == "ledger/end":
        keys.append(LEDGER_KEYS.facts)
    client, before = connect(user.url(limited.url)), cpu_of(admin)

    with pytest.raises(Exception, match="arguments are allowed"):
        client.execute_command("EVALSHA", digest, len(keys), *keys, *["1"] * 300_000)
    if script not in ("ledger/end", "tensors/install"):
        with pytest.raises(Exception, match="bytes"):
            client.execute_command(
                "EVALSHA", digest, len(keys), *keys, b"1" * (MAX_STRING_BYTES - 1)
            )

    client.close()
    assert longest_call(admin, before) < LONG


def test_repeated_fields_without_reading_fill_no_server(
    admin: RedisClient, limited: RedisServer, sockets: ExitStack
) -> None:
    user = tensors_user(SECRET, JOB, WORKER)
    admin.hset(TENSOR_KEYS.applied, "1", b"x" * MAX_STRING_BYTES)

    for _ in range(4):
        connection = signed_in(limited, user, sockets)
        connection.sendall(packed("HMGET", TENSOR_KEYS.applied, *["1"] * 1000))
    for _ in range(50):
        connection = signed_in(limited, user, sockets)
        connection.sendall(packed("HGET", TENSOR_KEYS.applied, "1"))

    await_truth(lambda: admin.info("memory")["used_memory"] < CLIENTS + (16 << 20))
    assert admin.info("memory")["used_memory_peak"] < LIMIT


def test_connections_of_the_platform_are_the_last_to_be_closed(
    admin: RedisClient, limited: RedisServer, sockets: ExitStack
) -> None:
    # Given a worker with many answers that it doesn't read, shorter than those of the platform
    user, long = tensors_user(SECRET, JOB, WORKER), b"x" * MAX_STRING_BYTES
    admin.hset(TENSOR_KEYS.applied, mapping={"1": long[: 2 << 20], "2": long})
    platform = connect(limited.url, over_limit=True)
    reader = platform.connection_pool.get_connection()
    for _ in range(40):
        connection = signed_in(limited, user, sockets)
        # The kernel takes some megabytes of them.
        connection.sendall(packed("HGET", TENSOR_KEYS.applied, "1") * 5)

    # When they leave no room for the platform's
    for _ in range(8):
        reader.send_command("HGET", TENSOR_KEYS.applied, "2")
    await_truth(lambda: admin.info("stats")["evicted_clients"] > 0)

    # Then it reads them nevertheless
    assert [reader.read_response() for _ in range(8)] == [long] * 8
    platform.close()


def test_commands_that_never_end_fill_no_server(
    admin: RedisClient, limited: RedisServer, sockets: ExitStack
) -> None:
    user = ledger_user(SECRET, JOB)
    half = b"$%d\r\n" % MAX_STRING_BYTES + b"x" * MAX_STRING_BYTES + b"\r\n"
    for _ in range(3):
        connection = signed_in(limited, user, sockets)
        connection.sendall(b"*1000\r\n$4\r\nHSET\r\n")
        with pytest.raises(ConnectionError):
            send_often(connection, half, 999)

    assert admin.info("memory")["used_memory_peak"] < LIMIT
    assert admin.ping()


@pytest.mark.parametrize("number", [MAX_ENTRIES, MAX_ENTRIES + 1])
def test_a_quota_counts_entries(number: int, admin: RedisClient) -> None:
    admin.sadd(TENSOR_KEYS.pin_requests, *range(number))

    why = ContentQuota(admin, {TENSOR_KEYS.pin_requests: 64 << 20}).enforce()

    assert (why is None) == (number == MAX_ENTRIES)
    assert why is None or f"{number} entries of pin-requests" in why
    assert bool(admin.exists(TENSOR_KEYS.pin_requests)) == (why is None)


def test_a_quota_finds_few_long_entries_among_many_short_ones(admin: RedisClient) -> None:
    quota = ContentQuota(admin, {LEDGER_KEYS.workers: MAX_CONTENT_BYTES})
    admin.hset(LEDGER_KEYS.workers, mapping=dict.fromkeys(map(str, range(50_000)), "x"))
    assert quota.enforce() is None
    for number in range(16):
        admin.hset(LEDGER_KEYS.workers, f"long {number}", b"x" * MAX_STRING_BYTES)

    assert "of workers, at most 64 are allowed" in (quota.enforce() or "")
    assert not admin.exists(LEDGER_KEYS.workers)


class TestMemory:
    def fill(self, admin: RedisClient, key: str) -> None:
        """Take a little more than the workers of a job may take."""
        size = int(LIMIT * MAX_SHARE_BESIDE_OTHERS) // 64 + 1
        for number in range(64):
            admin.set(f"{key}{number}", b"x" * size)

    @pytest.fixture
    def no_grace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quotas, "GRACE_SECONDS", 0.0)

    @pytest.mark.usefixtures("no_grace")
    def test_workers_of_one_job_leave_room_to_others(self, admin: RedisClient) -> None:
        self.fill(admin, f"{TENSOR_KEYS.prefix}u:{WORKER}.")

        (found,) = self.excess(admin, set()).items()

        assert found[0] == JOB
        assert "MiB into the tensors server, at most 128 are allowed" in found[1]

    @pytest.mark.usefixtures("no_grace")
    def test_the_first_snapshot_counts_until_it_is_there(self, admin: RedisClient) -> None:
        self.fill(admin, f"{TENSOR_KEYS.prefix}s:0.0:")

        assert self.excess(admin, {JOB}).keys() == {JOB}
        assert self.excess(admin, set()) == {}

    def test_a_job_may_have_had_a_server_alone_before_a_restart(self, admin: RedisClient) -> None:
        self.fill(admin, f"{TENSOR_KEYS.prefix}u:{WORKER}.")

        assert self.excess(admin, set()) == {}

    def test_a_job_may_have_a_server_alone(self, admin: RedisClient) -> None:
        self.fill(admin, f"{TENSOR_KEYS.prefix}u:{WORKER}.")
        quota = MemoryQuota(admin)

        # Also for a moment after another one was submitted.
        assert [quota.excess({JOB}, set()), quota.excess({JOB, OTHER}, set())] == [{}, {}]

    def excess(self, admin: RedisClient, without_model: set[str]) -> dict[str, str]:
        return MemoryQuota(admin).excess({JOB, OTHER}, without_model)
