"""Rights of workers' users on real servers: what they can do, and what the server denies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import RedisServer
from support.lines import printed
from support.servers import allow_database, url_of
from support.world import World, blocks_of

import vcasgd.store
from vcasgd.errors import Cause, StoreDenied, StoreError
from vcasgd.learning.applied_record import BLOCK, BLOCK_BYTES
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
from vcasgd.store.ledger.job import Failure
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases, Wait, WorkKind
from vcasgd.store.tensors import updates
from vcasgd.store.tensors.snapshot import Record
from vcasgd.store.tensors.snapshot_store import ONLY_CHUNK, SnapshotStore
from vcasgd.store.tensors.updates import NO_COMMIT, UpdateSender

pytestmark = pytest.mark.both_servers

SECRET = "a secret of the cluster"
WORKER = "w-1"
EVERY_SCRIPT = LEDGER_SCRIPTS + TENSORS_SCRIPTS
PLATFORM_SCRIPTS = sorted(
    {
        f"{path.parent.name}/{path.stem}"
        for path in (Path(vcasgd.store.__file__).parent / "scripts").glob("*/*.lua")
    }
    - {*EVERY_SCRIPT}
)

Login = Callable[[User, int], RedisClient]


@pytest.fixture
def login(server: RedisServer, world: World) -> Iterator[Login]:
    """Return ``login(user, database)``, which creates the user and a client logged in as it."""
    created: set[str] = set()
    with ExitStack() as stack:

        def as_user(user: User, database: int) -> RedisClient:
            AclUsers(world.ledger, EVERY_SCRIPT, 0).sync([user])
            created.add(user.name)
            allow_database(world.ledger, user.name, database)
            client = connect(user.url(url_of(server, database)))
            stack.callback(client.close)
            return client

        yield as_user
        world.ledger.execute_command("ACL", "DELUSER", *created or {"nobody"})


@pytest.fixture
def ledger_as_worker(login: Login, world: World) -> RedisClient:
    return login(ledger_user(SECRET, world.job), 0)


@pytest.fixture
def tensors_as_worker(login: Login, world: World) -> RedisClient:
    return login(tensors_user(SECRET, world.job, WORKER), 1)


def denied(call: Callable[[], Any]) -> bool:
    try:
        call()
    except StoreDenied:
        return True
    except StoreError as error:
        # the server denies DEBUG to everyone before it checks the user
        return "command not allowed" in str(error)
    return False


# --- what is denied ---------------------------------------------------------------------------

ADMINISTRATION = [
    "FLUSHALL", "FLUSHDB", "CONFIG GET requirepass", "CONFIG SET requirepass x", "ACL LIST",
    "ACL WHOAMI", "ACL SETUSER default nopass", "KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE",
    "SCRIPT FLUSH", "SCRIPT KILL", "FUNCTION FLUSH", "SHUTDOWN NOSAVE", "DEBUG SLEEP 0",
    "CLIENT LIST", "CLIENT KILL TYPE normal", "CLIENT PAUSE 1000", "MONITOR", "SAVE", "BGSAVE",
    "BGREWRITEAOF", "REPLICAOF 127.0.0.1 1", "FAILOVER", "SWAPDB 0 1", "INFO", "SLOWLOG GET",
    "LATENCY LATEST", "MEMORY STATS", "MODULE LIST", "COMMAND", "PUBLISH channel x",
    "SUBSCRIBE channel", "MIGRATE 127.0.0.1 1 k 0 100", "CLUSTER INFO", "OBJECT FREQ k",
    "SELECT 9", "MULTI", "WATCH k",
]  # fmt: skip


@pytest.mark.parametrize("command", ADMINISTRATION)
@pytest.mark.parametrize("role", ["ledger", "tensors"])
def test_administration_is_denied(
    role: str, command: str, ledger_as_worker: RedisClient, tensors_as_worker: RedisClient
) -> None:
    client = ledger_as_worker if role == "ledger" else tensors_as_worker

    assert denied(lambda: client.execute_command(*command.split()))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("HGETALL", "record"), ("HGETALL", "workers"), ("HSET", "workers"), ("XADD", "events"),
        ("ZADD", "leases"), ("HSET", "evaluations"), ("XADD", "logs"), ("RPUSH", "failures"),
    ],
)  # fmt: skip
def test_another_jobs_ledger_keys_are_denied(
    command: str, name: str, ledger_as_worker: RedisClient, world: World
) -> None:
    for other in (f"{world.job}x", world.job[:-1], "other-abcdef"):
        refuses(ledger_as_worker, [command], getattr(LedgerKeys(other), name))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("HSET", "record"), ("DEL", "record"), ("HSET", "quarantine"), ("HDEL", "quarantine"),
        ("SREM", "draining"), ("HSET", "blocks"), ("HSET", "work"), ("DEL", "counters"),
        ("DEL", "events"), ("HSET", "placed"), ("HDEL", "placed"), ("DEL", "placed"),
        ("XTRIM", "events"), ("HSET", "checkpoints"), ("HSET", "vanished"), ("XADD", "metrics"),
        ("LRANGE", "failures"), ("XRANGE", "logs"), ("XRANGE", "events"), ("HSET", "tuning"),
    ],
)  # fmt: skip
def test_unneeded_access_to_the_jobs_own_ledger_keys_is_denied(
    command: str, name: str, ledger_as_worker: RedisClient, world: World
) -> None:
    refuses(ledger_as_worker, [command], getattr(world.ledger_keys, name))


@pytest.mark.parametrize(
    "key",
    ["vcasgd:{fleet}:jobs", "vcasgd:{fleet}:commands", "vcasgd:{fleet}:controller",
     "vcasgd:{fleet}:machines", "vcasgd:{fleet}:servers", "RAY", "anything"],
)  # fmt: skip
def test_fleet_and_ray_state_is_denied(key: str, ledger_as_worker: RedisClient) -> None:
    refuses(ledger_as_worker, ["GET", "HGETALL", "SET", "DEL", "RPUSH"], key)


def test_a_worker_cannot_change_clearances(ledger_as_worker: RedisClient) -> None:
    refuses(ledger_as_worker, ["HSET", "HDEL", "DEL"], CLEARANCES)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("SET", "fence"), ("DEL", "fence"), ("SET", "meta"), ("DEL", "meta"),
        ("HSET", "applied"), ("HDEL", "applied"), ("HSET", "rejected"), ("HSET", "pins"),
        ("HDEL", "pins"), ("XTRIM", "stream"), ("DEL", "stream"), ("SREM", "pin_requests"),
        ("SET", "window"), ("DEL", "push_slots"), ("XADD", "news"),
    ],
)  # fmt: skip
def test_unneeded_access_to_the_jobs_own_tensors_keys_is_denied(
    command: str, name: str, tensors_as_worker: RedisClient, world: World
) -> None:
    refuses(tensors_as_worker, [command], getattr(world.keys, name))


def test_snapshots_and_payloads_of_other_workers_are_not_writable(
    tensors_as_worker: RedisClient, world: World
) -> None:
    snapshot, step = (world.keys.snapshot_chunk(1, 1, name) for name in ("0", "d0"))
    others = [world.keys.payload_chunk(f"{name}.1.1", 0) for name in ("w-2", "w-11", "w", "")]
    for key in (snapshot, step, *others):
        refuses(tensors_as_worker, ["SET", "UNLINK", "PERSIST"], key)
    assert tensors_as_worker.get(snapshot) is None


def test_another_jobs_tensors_are_denied(tensors_as_worker: RedisClient, world: World) -> None:
    for other in (f"{world.job}x", world.job[:-1], "other-abcdef"):
        keys = TensorKeys(other)
        for command, key in (
            ("GET", keys.meta),
            ("HGETALL", keys.applied),
            ("XADD", keys.stream),
            ("SET", keys.payload_chunk(f"{WORKER}.1.1", 0)),
        ):
            refuses(tensors_as_worker, [command], key)


def refuses(client: RedisClient, commands: Iterable[str], key: str) -> None:
    for command in commands:
        assert denied(lambda command=command: client.execute_command(*words(command, key))), (
            f"{command} {key}"
        )


def words(command: str, key: str) -> list[str]:
    """Return the words of a command that is valid apart from permissions."""
    rest = {
        "HSET": ["f", "v"], "HDEL": ["f"], "SET": ["v"], "XADD": ["*", "f", "v"],
        "ZADD": ["1", "m"], "RPUSH": ["v"], "SADD": ["m"], "SREM": ["m"],
        "XTRIM": ["MAXLEN", "0"], "LRANGE": ["0", "-1"], "XRANGE": ["-", "+"],
    }.get(command, [])  # fmt: skip
    return [command, key, *rest]


# --- scripts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [*PLATFORM_SCRIPTS, "return 1"])
def test_a_worker_can_run_no_script_but_its_own(
    script: str, ledger_as_worker: RedisClient, tensors_as_worker: RedisClient, world: World
) -> None:
    """A worker that knows a script's digest may call it with any of its job's keys."""
    text = script_source(script) if "/" in script else script
    digest = world.ledger.script_load(text)

    for client, key in (
        (ledger_as_worker, world.ledger_keys.counters),
        (tensors_as_worker, world.keys.pushed),
    ):
        for name in (digest, digest.upper()):
            assert denied(lambda client=client, key=key, name=name: client.evalsha(name, 1, key))
            assert denied(lambda client=client, name=name: client.evalsha(name, 0))
            assert denied(lambda client=client, key=key, name=name: client.evalsha_ro(name, 1, key))


def test_an_endless_loop_of_a_platform_script_is_denied(
    ledger_as_worker: RedisClient, world: World
) -> None:
    digest = world.ledger.script_load(script_source("ledger/transition"))
    keys, far = world.ledger_keys, str(-(10**15))
    ledger_as_worker.hset(keys.counters, "state", "running")

    assert denied(
        lambda: ledger_as_worker.evalsha(
            digest, 3, keys.counters, keys.open, keys.events, world.job, "failed", "1", "{}", far
        )
    )


@pytest.mark.parametrize("script", LEDGER_SCRIPTS)
def test_a_script_refuses_keys_in_other_places(
    script: str, ledger_as_worker: RedisClient, world: World
) -> None:
    digest = world.ledger.script_load(script_source(script))
    key = world.ledger_keys.counters

    with pytest.raises(StoreError, match="key 1 must be"):
        ledger_as_worker.evalsha(digest, 12, *[key] * 12, WORKER, "1000", "", "")


@pytest.mark.parametrize("script", TENSORS_SCRIPTS)
def test_a_tensors_script_refuses_keys_in_other_places(
    script: str, tensors_as_worker: RedisClient, world: World
) -> None:
    digest = world.tensors.script_load(script_source(script))

    with pytest.raises(StoreError, match="key 1 must be"):
        tensors_as_worker.evalsha(digest, 9, *[world.keys.tokens] * 9, "1", "1", "1", "1")


def test_a_lease_skips_a_bounded_number_of_subtasks(
    ledger_as_worker: RedisClient, world: World
) -> None:
    """A worker can write its leases, and any next subtask."""
    keys = world.ledger_keys
    full = {f"0:{block}": b"\xff" * BLOCK_BYTES for block in range(500)}
    world.ledger.hset(keys.blocks, mapping=full)
    world.ledger.hset(keys.work, mapping={"total": 2**40, "per_epoch": 2**40})
    world.ledger.zadd(keys.leases, {f"train:{500 * BLOCK + n}": 10**15 for n in range(500)})
    leases = Leases(ledger_as_worker, world.job, WORKER, 60)

    for reached in (500 * BLOCK, 500 * BLOCK + 500):
        assert isinstance(leases.acquire(), Wait)
        assert world.jobs.work(world.job)["next"] == reached

    lease = leases.acquire()
    assert isinstance(lease, Lease)
    assert lease.number == 500 * BLOCK + 500


def test_a_worker_cannot_load_a_script(tensors_as_worker: RedisClient, world: World) -> None:
    """An endless script would block the server for everyone."""
    endless = "while true do end"

    assert denied(lambda: tensors_as_worker.eval(endless, 0))
    assert denied(lambda: tensors_as_worker.eval_ro(endless, 0))
    assert denied(lambda: tensors_as_worker.script_load(endless))
    assert denied(lambda: tensors_as_worker.function_load(f"#!lua name=l\n{endless}"))


def test_a_worker_cannot_extend_a_loop_of_a_platform_script(
    ledger_as_worker: RedisClient, world: World
) -> None:
    ledger_as_worker.hset(world.ledger_keys.counters, "next", 2**53)
    assert denied(lambda: ledger_as_worker.hset(world.ledger_keys.work, "total", 2**53))

    world.accounts.reconcile(2, 0, 0, "{}", blocks_of())

    assert world.partition().expected == range(world.plan.total_subtasks)


def test_granted_commands_are_neither_administrative_nor_dangerous(world: World) -> None:
    for user in (
        ledger_user(SECRET, world.job),
        tensors_user(SECRET, world.job, WORKER, first_snapshot=True),
    ):
        granted = re.findall(r"\+([a-z|]+)", " ".join(user.rules))
        for command in granted:
            name, _, sub = command.partition("|")
            (info,) = world.ledger.execute_command("COMMAND", "INFO", name).values()
            categories = {str(each) for each in info["acl_categories"]}
            assert not categories & {"@admin", "@dangerous"}, f"{name} {sub}"


def test_all_that_workers_write_has_a_quota() -> None:
    """A grant to write another key fails here until readers are safe from a flood of it."""
    ledger, tensors = LedgerKeys("a-23abcd"), TensorKeys("a-23abcd")
    grants = (
        *ledger_user(SECRET, ledger.job).grants,
        *tensors_user(SECRET, tensors.job, WORKER, first_snapshot=True).grants,
    )
    written = {
        key
        for grant in grants
        if "W" in grant.mode and "evalsha" not in grant.commands
        for key in grant.keys
    }
    by_content = {*ledger.written_by_workers, *tensors.written_by_workers}
    by_memory = {f"{tensors.prefix}{each}" for each in (f"u:{WORKER}.*", "o:*", "s:*")}
    one_string = {tensors.meta}
    assert written == by_content | by_memory | one_string


def test_a_worker_cannot_pass_keys_of_the_platform_to_a_script(
    ledger_as_worker: RedisClient, world: World
) -> None:
    digest = world.ledger.script_load(script_source("ledger/release"))
    keys = world.ledger_keys

    for key in set(keys.all).difference(keys.worker_script_keys):
        assert denied(lambda key=key: ledger_as_worker.evalsha(digest, 1, key)), key
    for key in keys.worker_script_keys:
        assert not denied(lambda key=key: ledger_as_worker.evalsha(digest, 1, key)), key


# --- the grants are sufficient ----------------------------------------------------------------


def test_a_worker_can_do_its_work_in_the_ledger(
    ledger_as_worker: RedisClient, make_world: Callable[..., World], world: World
) -> None:
    jobs, leases = Jobs(ledger_as_worker), Leases(ledger_as_worker, world.job, WORKER, 60)
    assert jobs.get(world.job).facts == world.facts()

    lease = leases.acquire()
    assert isinstance(lease, Lease)
    assert leases.renew({"at": 1.0}, [lease]).lost == frozenset()
    assert leases.release(lease)
    world.expire()
    again = leases.acquire()
    assert isinstance(again, Lease)
    world.ledger.zadd(world.ledger_keys.open, {"evaluate:1": -1})
    chore = leases.acquire(WorkKind.EVALUATE)
    assert isinstance(chore, Lease)
    assert leases.report_evaluation(chore, {"version": 0, "metrics": {}, "worker": WORKER,
                                            "seconds": 0.0, "at": 0.0})  # fmt: skip
    jobs.add_logs(world.job, WORKER, printed(["a line"]))
    jobs.report_failure(world.job, Failure(WORKER, "train:0", "no", "", Cause.WORK))
    assert len(world.jobs.get(world.job).evaluations) == 1


def test_a_worker_can_do_its_work_in_the_tensors_server(
    tensors_as_worker: RedisClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = world.shard(token=2)
    shard.turn()
    sender = UpdateSender(tensors_as_worker, world.keys)
    snapshots = SnapshotStore(tensors_as_worker, world.keys)

    assert sender.begin(0, 0, 4, 1) == 0
    sender.wait_for_commit(0.01, NO_COMMIT)
    header, payload = world.update(0, 0, 4, 1, worker=WORKER, update=f"{WORKER}.1.1")
    assert sender.push(header, 0, payload).accepted
    assert sender.status([(0, 0, 4, header.update)]).outcomes == ["pending"]
    assert not sender.push(world.update(0, 0, 2, 1, update=f"{WORKER}.1.2")[0], 0, payload).accepted
    snapshots.request_pin("evaluation")
    shard.turn()
    asked = [(0, 0, 4, header.update)]
    _, status = sender.status_after_commit(1.0, NO_COMMIT, asked, (0, 0), ONLY_CHUNK)
    assert status.outcomes == ["applied"]
    assert len(status.content) == 4 * world.layout.floats
    with monkeypatch.context() as patch:
        patch.setattr(updates, "MAX_SMALL_PAYLOAD_BYTES", 0)
        header, payload = world.update(1, 0, 2, 1, worker=WORKER, update=f"{WORKER}.1.3")
        assert sender.push(header, 0, payload).accepted
    assert snapshots.version() == 1
    out = torch.empty(world.layout.floats)
    assert snapshots.fetch_rounded(out).version == 1
    assert snapshots.fetch_pinned("evaluation")[0].meta.version <= 1
    world.assert_exact()


def test_a_worker_installs_a_snapshot_only_while_the_job_has_none(
    login: Login, make_world: Callable[..., World]
) -> None:
    world = make_world()
    world.snapshots.delete_all()
    floats = torch.zeros(world.layout.floats)
    meta = world.first_meta()
    bounded = SnapshotStore(login(tensors_user(SECRET, world.job, WORKER), 1), world.keys)
    with pytest.raises(StoreDenied):
        bounded.install(0, meta, Record(), floats)

    user = tensors_user(SECRET, world.job, WORKER, first_snapshot=True)
    first = SnapshotStore(login(user, 1), world.keys)
    assert first.install(0, meta, Record(), floats)
    assert not first.install(0, meta, Record(), floats), "another worker was faster"

    assert denied(lambda: first.takeover(3))
