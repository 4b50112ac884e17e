"""Rights of workers' users on real servers: what they can do, and what the server denies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.harness import RedisServer
from support.lines import printed
from support.servers import allow_database, url_of
from support.world import RESULT, World, blocks_of, lease_of

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
from vcasgd.store.ledger.leases import Leases, Wait, WorkKind
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
#: Words behind the key of a command that is valid apart from permissions.
ARGUMENTS = {
    "HSET": "f v", "HDEL": "f", "SET": "v", "XADD": "* f v", "ZADD": "1 m", "RPUSH": "v",
    "SADD": "m", "SREM": "m", "XTRIM": "MAXLEN 0", "LRANGE": "0 -1", "XRANGE": "- +",
}  # fmt: skip
#: Commands by the keys of a worker's own job that they are not allowed for.
OWN_LEDGER_KEYS = {
    "record": "HSET DEL", "quarantine": "HSET HDEL", "draining": "SREM", "blocks": "HSET",
    "work": "HSET", "counters": "DEL", "placed": "HSET HDEL DEL", "checkpoints": "HSET",
    "events": "DEL XTRIM XRANGE", "vanished": "HSET", "metrics": "XADD", "failures": "LRANGE",
    "logs": "XRANGE", "tuning": "HSET",
}  # fmt: skip
OWN_TENSORS_KEYS = {
    "fence": "SET DEL", "meta": "SET DEL", "applied": "HSET HDEL", "rejected": "HSET",
    "pins": "HSET HDEL", "stream": "XTRIM DEL", "pin_requests": "SREM", "window": "SET",
    "push_slots": "DEL", "news": "XADD",
}  # fmt: skip
FLEET_AND_RAY = [
    *(f"vcasgd:{{fleet}}:{name}" for name in ("jobs", "commands", "controller", "machines")),
    *("vcasgd:{fleet}:servers", "RAY", "anything"),
]


def denied(client: RedisClient, *command: object) -> bool:
    try:
        client.execute_command(*command)
    except StoreDenied:
        return True
    except StoreError as error:
        # the server denies DEBUG to everyone before it checks the user
        return "command not allowed" in str(error)
    return False


def granted(client: RedisClient, commands: Mapping[str, str]) -> list[str]:
    """Return those of the ``commands`` for keys that the server does not deny."""
    return [
        f"{command} {key}"
        for key, names in commands.items()
        for command in names.split()
        if not denied(client, command, key, *ARGUMENTS.get(command, "").split())
    ]


def test_administration_is_denied(
    ledger_as_worker: RedisClient, tensors_as_worker: RedisClient
) -> None:
    for client in (ledger_as_worker, tensors_as_worker):
        assert [each for each in ADMINISTRATION if not denied(client, *each.split())] == []


def test_another_jobs_ledger_keys_are_denied(ledger_as_worker: RedisClient, world: World) -> None:
    for other in (f"{world.job}x", world.job[:-1], "other-abcdef"):
        keys = LedgerKeys(other)
        commands = {
            keys.record: "HGETALL", keys.workers: "HGETALL HSET", keys.events: "XADD",
            keys.leases: "ZADD", keys.evaluations: "HSET", keys.logs: "XADD",
            keys.failures: "RPUSH",
        }  # fmt: skip
        assert granted(ledger_as_worker, commands) == []


def test_unneeded_access_to_the_jobs_own_keys_is_denied(
    ledger_as_worker: RedisClient, tensors_as_worker: RedisClient, world: World
) -> None:
    ledger = {getattr(world.ledger_keys, name): each for name, each in OWN_LEDGER_KEYS.items()}
    tensors = {getattr(world.keys, name): each for name, each in OWN_TENSORS_KEYS.items()}

    assert granted(ledger_as_worker, ledger) == []
    assert granted(tensors_as_worker, tensors) == []


def test_fleet_and_ray_state_is_denied(ledger_as_worker: RedisClient) -> None:
    commands = dict.fromkeys(FLEET_AND_RAY, "GET HGETALL SET DEL RPUSH")

    assert granted(ledger_as_worker, commands) == []


def test_a_worker_cannot_change_clearances(ledger_as_worker: RedisClient) -> None:
    assert granted(ledger_as_worker, {CLEARANCES: "HSET HDEL DEL"}) == []


def test_snapshots_and_payloads_of_other_workers_are_not_writable(
    tensors_as_worker: RedisClient, world: World
) -> None:
    snapshot, step = (world.keys.snapshot_chunk(1, 1, name) for name in ("0", "d0"))
    others = [world.keys.payload_chunk(f"{name}.1.1", 0) for name in ("w-2", "w-11", "w", "")]

    commands = dict.fromkeys((snapshot, step, *others), "SET UNLINK PERSIST")
    assert granted(tensors_as_worker, commands) == []
    assert tensors_as_worker.get(snapshot) is None


def test_another_jobs_tensors_are_denied(tensors_as_worker: RedisClient, world: World) -> None:
    for other in (f"{world.job}x", world.job[:-1], "other-abcdef"):
        keys = TensorKeys(other)
        commands = {
            keys.meta: "GET", keys.applied: "HGETALL", keys.stream: "XADD",
            keys.payload_chunk(f"{WORKER}.1.1", 0): "SET",
        }  # fmt: skip
        assert granted(tensors_as_worker, commands) == []


# --- scripts ----------------------------------------------------------------------------------


def test_a_worker_can_run_no_script_but_its_own(
    ledger_as_worker: RedisClient, tensors_as_worker: RedisClient, world: World
) -> None:
    """A worker that knows a script's digest may call it with any of its job's keys."""
    for script in (*map(script_source, PLATFORM_SCRIPTS), "return 1"):
        digest = world.ledger.script_load(script)
        for client, key in (
            (ledger_as_worker, world.ledger_keys.counters),
            (tensors_as_worker, world.keys.pushed),
        ):
            for name in (digest, digest.upper()):
                assert denied(client, "EVALSHA", name, 1, key), script
                assert denied(client, "EVALSHA", name, 0), script
                assert denied(client, "EVALSHA_RO", name, 1, key), script


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_refuses_keys_in_other_places(
    script: str, ledger_as_worker: RedisClient, tensors_as_worker: RedisClient, world: World
) -> None:
    digest = world.ledger.script_load(script_source(script))
    if script in LEDGER_SCRIPTS:
        client, keys = ledger_as_worker, [world.ledger_keys.counters] * 12
    else:
        client, keys = tensors_as_worker, [world.keys.tokens] * 9

    with pytest.raises(StoreError, match="key 1 must be"):
        client.evalsha(digest, len(keys), *keys, WORKER, "1000", "1", "1")


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

    lease = lease_of(leases.acquire())
    assert lease.number == 500 * BLOCK + 500


def test_a_worker_cannot_load_a_script(tensors_as_worker: RedisClient, world: World) -> None:
    """An endless script would block the server for everyone."""
    endless = "while true do end"

    assert denied(tensors_as_worker, "EVAL", endless, 0)
    assert denied(tensors_as_worker, "EVAL_RO", endless, 0)
    assert denied(tensors_as_worker, "SCRIPT", "LOAD", endless)
    assert denied(tensors_as_worker, "FUNCTION", "LOAD", f"#!lua name=l\n{endless}")


def test_a_worker_cannot_extend_a_loop_of_a_platform_script(
    ledger_as_worker: RedisClient, world: World
) -> None:
    ledger_as_worker.hset(world.ledger_keys.counters, "next", 2**53)

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
    digest = world.ledger.script_load(script_source("ledger/end"))
    keys = world.ledger_keys

    for key in set(keys.all).difference(keys.worker_script_keys):
        assert denied(ledger_as_worker, "EVALSHA", digest, 1, key), key
    for key in keys.worker_script_keys:
        assert not denied(ledger_as_worker, "EVALSHA", digest, 1, key), key


# --- the grants are sufficient ----------------------------------------------------------------


def test_a_worker_can_do_its_work_in_the_ledger(
    ledger_as_worker: RedisClient, make_world: Callable[..., World], world: World
) -> None:
    jobs, leases = Jobs(ledger_as_worker), Leases(ledger_as_worker, world.job, WORKER, 60)
    assert jobs.get(world.job).facts == world.facts()

    lease = lease_of(leases.acquire())
    assert leases.renew({"at": 1.0}, [lease]).lost == frozenset()
    assert leases.release(lease)
    world.expire()
    lease_of(leases.acquire())
    world.ledger.zadd(world.ledger_keys.open, {"evaluate:1": -1})
    chore = lease_of(leases.acquire(WorkKind.EVALUATE))
    assert leases.report_evaluation(chore, RESULT)
    jobs.add_logs(world.job, WORKER, printed(["a line"]))
    jobs.report_failure(world.job, Failure(WORKER, "train:0", "no", "", Cause.WORK))
    assert len(world.jobs.get(world.job).evaluations) == 1


def test_a_worker_can_do_its_work_in_the_tensors_server(
    tensors_as_worker: RedisClient, world: World
) -> None:
    shard = world.started_shard(token=2)
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
    header, payload = world.update(1, 0, 2, 1, worker=WORKER, update=f"{WORKER}.1.3")
    assert sender.push(header, 0, payload, after=["earlier"]).accepted
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

    with pytest.raises(StoreDenied):
        first.takeover(3)
