"""What a worker's users can do on real servers, and all that they are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.harness import RedisServer
from support.servers import url_of
from support.world import World

from vcasgd.errors import StoreDenied, StoreError, StoreUnavailable
from vcasgd.store.acl import (
    LEDGER_SCRIPTS,
    LEDGER_USERS,
    TENSORS_SCRIPTS,
    TENSORS_USERS,
    AclUsers,
    User,
    ledger_user,
    tensors_user,
    worker_key,
)
from vcasgd.store.connection import RedisClient, connect, script_source
from vcasgd.store.keys import CLEARANCES, LedgerKeys, TensorKeys
from vcasgd.store.ledger.job import Failure
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases, WorkKind
from vcasgd.store.ledger.tuning import Tuned, Tunings
from vcasgd.store.tensors.snapshot import Record
from vcasgd.store.tensors.snapshots import Snapshots
from vcasgd.store.tensors.updates import UpdateSender

SECRET = "a secret of the cluster"
WORKER = "w-1"
EVERY_SCRIPT = LEDGER_SCRIPTS + TENSORS_SCRIPTS

Login = Callable[[User, int], RedisClient]


@pytest.fixture
def login(server: RedisServer, world: World) -> Iterator[Login]:
    """``login(user, database)``: makes the user, and a client that is signed in as it."""
    made: set[str] = set()
    with ExitStack() as stack:

        def as_user(user: User, database: int) -> RedisClient:
            AclUsers(world.ledger, EVERY_SCRIPT, 0).keep([user])
            made.add(user.name)
            client = connect(user.url(url_of(server, database)))
            stack.callback(client.close)
            return client

        yield as_user
        world.ledger.execute_command("ACL", "DELUSER", *made or {"nobody"})


@pytest.fixture
def ledger_as_worker(login: Login, world: World) -> RedisClient:
    return login(ledger_user(SECRET, world.job), 0)


@pytest.fixture
def tensors_as_worker(login: Login, world: World) -> RedisClient:
    return login(tensors_user(SECRET, world.job, WORKER), 1)


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except StoreDenied:
        return True
    except StoreError as error:
        # DEBUG is refused to everybody, before the user is looked at
        return "command not allowed" in str(error)
    return False


# --- what is refused --------------------------------------------------------------------------

ADMINISTRATION = [
    "FLUSHALL", "FLUSHDB", "CONFIG GET requirepass", "CONFIG SET requirepass x", "ACL LIST",
    "ACL WHOAMI", "ACL SETUSER default nopass", "KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE",
    "SCRIPT FLUSH", "SCRIPT KILL", "FUNCTION FLUSH", "SHUTDOWN NOSAVE", "DEBUG SLEEP 0",
    "CLIENT LIST", "CLIENT KILL TYPE normal", "CLIENT PAUSE 1000", "MONITOR", "SAVE", "BGSAVE",
    "BGREWRITEAOF", "REPLICAOF 127.0.0.1 1", "FAILOVER", "SWAPDB 0 1", "INFO", "SLOWLOG GET",
    "LATENCY LATEST", "MEMORY STATS", "MODULE LIST", "COMMAND", "PUBLISH channel x",
    "SUBSCRIBE channel", "MIGRATE 127.0.0.1 1 k 0 100", "CLUSTER INFO", "OBJECT FREQ k",
]  # fmt: skip


@pytest.mark.parametrize("command", ADMINISTRATION)
@pytest.mark.parametrize("role", ["ledger", "tensors"])
def test_administration_is_refused(
    role: str, command: str, ledger_as_worker: RedisClient, tensors_as_worker: RedisClient
) -> None:
    client = ledger_as_worker if role == "ledger" else tensors_as_worker

    assert refused(lambda: client.execute_command(*command.split()))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("HGETALL", "record"), ("HGETALL", "workers"), ("HSET", "workers"), ("XADD", "events"),
        ("ZADD", "leases"), ("HSET", "evaluations"), ("XADD", "logs"), ("RPUSH", "failures"),
    ],
)  # fmt: skip
def test_the_ledgers_keys_of_another_job_are_refused(
    command: str, name: str, ledger_as_worker: RedisClient, world: World
) -> None:
    for other in (f"{world.job}x", world.job[:-1], "other-abcdef"):
        key = getattr(LedgerKeys(other), name)

        assert refused(lambda key=key: ledger_as_worker.execute_command(*words(command, key)))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("HSET", "record"), ("DEL", "record"), ("HSET", "quarantine"), ("HDEL", "quarantine"),
        ("SREM", "draining"), ("SADD", "done"), ("HSET", "work"), ("DEL", "counters"),
        ("DEL", "events"), ("HSET", "placed"), ("HDEL", "placed"), ("DEL", "placed"),
        ("XTRIM", "events"), ("HSET", "checkpoints"), ("HSET", "vanished"), ("XADD", "metrics"),
        ("LRANGE", "failures"), ("XRANGE", "logs"), ("XRANGE", "events"), ("HSET", "tuning"),
    ],
)  # fmt: skip
def test_what_a_worker_need_not_touch_of_its_job_in_the_ledger(
    command: str, name: str, ledger_as_worker: RedisClient, world: World
) -> None:
    key = getattr(world.ledger_keys, name)

    assert refused(lambda: ledger_as_worker.execute_command(*words(command, key)))


def test_a_worker_reads_what_was_found_by_measuring(
    ledger_as_worker: RedisClient, world: World
) -> None:
    Tunings(world.ledger, world.job).tell(mixing=0.5, shares={"w-1": 0.25})

    assert Tunings(ledger_as_worker, world.job).read() == Tuned(mixing=0.5, shares={"w-1": 0.25})
    assert Jobs(ledger_as_worker).get(world.job).tuned.mixing == 0.5


@pytest.mark.parametrize(
    "key",
    ["vcasgd:{fleet}:jobs", "vcasgd:{fleet}:commands", "vcasgd:{fleet}:controller",
     "vcasgd:{fleet}:instances", "vcasgd:{fleet}:servers", "RAY", "anything"],
)  # fmt: skip
def test_the_fleet_and_rays_state_are_refused(key: str, ledger_as_worker: RedisClient) -> None:
    for command in ("GET", "HGETALL", "SET", "DEL", "RPUSH"):
        assert refused(
            lambda command=command: ledger_as_worker.execute_command(*words(command, key))
        )


@pytest.mark.parametrize("command", ["HSET", "HDEL", "DEL"])
def test_nobody_clears_his_own_pool(command: str, ledger_as_worker: RedisClient) -> None:
    assert refused(lambda: ledger_as_worker.execute_command(*words(command, CLEARANCES)))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("SET", "fence"), ("DEL", "fence"), ("SET", "meta"), ("DEL", "meta"),
        ("HSET", "applied"), ("HDEL", "applied"), ("HSET", "rejected"), ("HSET", "pins"),
        ("HDEL", "pins"), ("XTRIM", "stream"), ("DEL", "stream"), ("SREM", "wanted"),
        ("SET", "window"), ("DEL", "places"), ("XADD", "news"),
    ],
)  # fmt: skip
def test_what_a_worker_need_not_touch_of_its_job_in_the_tensors_server(
    command: str, name: str, tensors_as_worker: RedisClient, world: World
) -> None:
    key = getattr(world.keys, name)

    assert refused(lambda: tensors_as_worker.execute_command(*words(command, key)))


def test_snapshots_and_the_payloads_of_others_are_read_only_or_out_of_reach(
    tensors_as_worker: RedisClient, world: World
) -> None:
    snapshot = world.keys.snapshot_chunk(1, 1, "0")
    others = [world.keys.payload_chunk(f"{name}.1.1", 0) for name in ("w-2", "w-11", "w", "")]
    for key in (snapshot, *others):
        for command in ("SET", "UNLINK", "PERSIST"):
            assert refused(
                lambda command=command, key=key: tensors_as_worker.execute_command(
                    *words(command, key)
                )
            ), f"{command} {key}"
    assert tensors_as_worker.get(snapshot) is None


def test_the_tensors_of_another_job_are_refused(
    tensors_as_worker: RedisClient, world: World
) -> None:
    for other in (f"{world.job}x", world.job[:-1], "other-abcdef"):
        keys = TensorKeys(other)
        for command, key in (
            ("GET", keys.meta),
            ("HGETALL", keys.applied),
            ("XADD", keys.stream),
            ("SET", keys.payload_chunk(f"{WORKER}.1.1", 0)),
        ):
            assert refused(
                lambda command=command, key=key: tensors_as_worker.execute_command(
                    *words(command, key)
                )
            )


def words(command: str, key: str) -> list[str]:
    """A command that would be valid if it were allowed."""
    rest = {
        "HSET": ["f", "v"], "HDEL": ["f"], "SET": ["v"], "XADD": ["*", "f", "v"],
        "ZADD": ["1", "m"], "RPUSH": ["v"], "SADD": ["m"], "SREM": ["m"],
        "XTRIM": ["MAXLEN", "0"], "LRANGE": ["0", "-1"], "XRANGE": ["-", "+"],
    }.get(command, [])  # fmt: skip
    return [command, key, *rest]


# --- a script can do no more than its user ----------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "redis.call('SET', KEYS[1], '99')",
        "redis.call('SET', '%(fence)s', '99')",
        "redis.call('GET', 'vcasgd:{other-abcdef:0}:meta')",
        "redis.call('SET', 'vcasgd:{other-abcdef:0}:meta', '1')",
        "redis.call('FLUSHALL')",
        "redis.call('CONFIG', 'GET', '*')",
        "redis.call('KEYS', '*')",
        "redis.call('ACL', 'LIST')",
        "redis.call('SCRIPT', 'FLUSH')",
        "redis.setresp(3); redis.call('DEL', KEYS[1])",
    ],
)
def test_a_script_can_do_no_more_than_its_user(
    body: str, tensors_as_worker: RedisClient, world: World
) -> None:
    world.tensors.set(world.keys.fence, 7)
    digest = world.tensors.script_load(body % {"fence": world.keys.fence})

    with pytest.raises(StoreError):
        tensors_as_worker.evalsha(digest, 1, world.keys.fence)

    assert world.tensors.get(world.keys.fence) == b"7"


def test_a_refused_script_is_known_as_refused(tensors_as_worker: RedisClient, world: World) -> None:
    digest = world.tensors.script_load("return redis.call('SET', KEYS[1], 1)")

    with pytest.raises(StoreDenied):
        tensors_as_worker.evalsha(digest, 1, world.keys.fence)


def test_a_script_on_the_keys_of_another_job_is_refused(
    tensors_as_worker: RedisClient, world: World
) -> None:
    digest = world.tensors.script_load("return 1")

    with pytest.raises(StoreDenied):
        tensors_as_worker.evalsha(digest, 1, TensorKeys("other-abcdef").meta)


def test_a_worker_brings_no_script_of_its_own(tensors_as_worker: RedisClient, world: World) -> None:
    """One that never ends would stop the server for everybody."""
    endless = "while true do end"

    assert refused(lambda: tensors_as_worker.eval(endless, 0))
    assert refused(lambda: tensors_as_worker.eval_ro(endless, 0))
    assert refused(lambda: tensors_as_worker.script_load(endless))
    assert refused(lambda: tensors_as_worker.function_load(f"#!lua name=l\n{endless}"))


@pytest.mark.parametrize("script", ["ledger/account", "ledger/reconcile", "ledger/submit"])
def test_the_ledgers_other_scripts_stop_a_worker_at_once(
    script: str, ledger_as_worker: RedisClient, world: World
) -> None:
    """Whoever knows a script's digest may name it, with any keys that are its job's."""
    digest = world.ledger.script_load(script_source(script))
    of, far = world.ledger_keys, str(10**15)
    ledger_as_worker.hset(of.counters, mapping={"per_epoch": far, "finished": f"-{far}"})
    # what may be written is in the place of what may not
    for work in (of.work, of.counters):
        keys = [work, of.leases, of.holders, of.open, of.done, of.evaluations, of.counters,
                of.done, of.counters]  # fmt: skip
        with pytest.raises(StoreError):
            ledger_as_worker.evalsha(digest, len(keys), *keys, "0", far, far, far, far, far, far)


@pytest.mark.parametrize(
    "script", ["tensors/commit", "tensors/takeover", "tensors/pin", "tensors/reap"]
)
def test_the_tensors_servers_other_scripts_stop_a_worker_at_once(
    script: str, tensors_as_worker: RedisClient, world: World
) -> None:
    digest = world.tensors.script_load(script_source(script))
    world.tensors.set(world.keys.fence, 1)
    world.tensors.zadd(world.keys.places, {"2": 1.0})
    at = world.keys
    keys = [at.fence, at.meta, at.applied, at.pushed, at.tokens, at.stream, at.rejected, at.pins,
            at.places, at.news]  # fmt: skip
    if script == "reap":
        keys = [at.places, at.stream]

    with pytest.raises(StoreError):
        tensors_as_worker.evalsha(digest, len(keys), *keys, str(10**15), "2", "{}", "3")


def test_a_loop_of_the_parameter_servers_is_not_as_long_as_a_worker_says(
    ledger_as_worker: RedisClient, world: World
) -> None:
    ledger_as_worker.hset(world.ledger_keys.counters, "next", 2**53)
    assert refused(lambda: ledger_as_worker.hset(world.ledger_keys.work, "total", 2**53))

    reopened = world.accounts.reconcile(2, 0, 0, "{}", [])

    assert reopened == world.spec.total_subtasks


def test_what_is_granted_is_neither_administration_nor_dangerous(world: World) -> None:
    for user in (
        ledger_user(SECRET, world.job),
        tensors_user(SECRET, world.job, WORKER, first_snapshot=True),
    ):
        granted = re.findall(r"\+([a-z|]+)", " ".join(user.rules))
        for command in granted:
            name, _, sub = command.partition("|")
            (found,) = world.ledger.execute_command("COMMAND", "INFO", name).values()
            categories = {str(each) for each in found["acl_categories"]}
            assert not categories & {"@admin", "@dangerous"}, f"{name} {sub}"


# --- what is allowed is enough ----------------------------------------------------------------


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
    jobs.event(world.job, "evaluated", "done")
    jobs.add_logs(world.job, WORKER, ["a line"])
    jobs.report_failure(world.job, Failure(WORKER, "train:0", "no", "", fatal=False))
    assert len(world.jobs.get(world.job).evaluations) == 1


def test_a_worker_can_report_the_facts_of_the_first_snapshot(
    login: Login, make_world: Callable[..., World]
) -> None:
    world = make_world(running=False)
    leases = Leases(login(ledger_user(SECRET, world.job), 0), world.job, WORKER, 60)
    lease = leases.acquire()
    assert isinstance(lease, Lease)

    assert leases.report_facts(lease, world.facts().to_dict())

    assert world.jobs.get(world.job).facts == world.facts()


def test_a_worker_can_do_its_work_in_the_tensors_server(
    tensors_as_worker: RedisClient, world: World
) -> None:
    shard = world.shard(token=2)
    shard.turn()
    sender = UpdateSender(tensors_as_worker, world.keys)
    snapshots = Snapshots(tensors_as_worker, world.keys)

    assert sender.begin(0, 0, 4, 1) == 0
    sender.await_news(0.01)
    header, payload = world.update(0, 0, 4, 1, worker=WORKER, update=f"{WORKER}.1.1")
    assert sender.push(header, 0, payload).accepted
    assert sender.status([(0, 0, 4, header.update)]).fates == ["pending"]
    assert not sender.push(world.update(0, 0, 2, 1, update=f"{WORKER}.1.2")[0], 0, payload).accepted
    snapshots.want_pin("evaluation")
    shard.turn()
    assert sender.status([(0, 0, 4, header.update)]).fates == ["applied"]
    assert snapshots.version() == 1
    out = torch.empty(world.layout.floats)
    assert snapshots.fetch(out).meta.version == 1
    assert snapshots.fetch_pinned("evaluation")[0].meta.version <= 1
    world.assert_exact()


def test_only_before_there_is_a_model_a_worker_may_install_one(
    login: Login, make_world: Callable[..., World]
) -> None:
    world = make_world()
    world.snapshots.forget()
    floats = torch.zeros(world.layout.floats)
    meta = world.first_meta()
    bounded = Snapshots(login(tensors_user(SECRET, world.job, WORKER), 1), world.keys)
    with pytest.raises(StoreDenied):
        bounded.install(0, meta, Record(), floats)

    user = tensors_user(SECRET, world.job, WORKER, first_snapshot=True)
    first = Snapshots(login(user, 1), world.keys)
    assert first.install(0, meta, Record(), floats)
    assert not first.install(0, meta, Record(), floats), "somebody else was faster"

    assert refused(lambda: first.takeover(3))


# --- keeping the users ------------------------------------------------------------------------


class TestAccess:
    def names(self, server: RedisClient) -> set[str]:
        found = server.execute_command("ACL", "USERS")
        return {name.decode() for name in found} - {"default"}

    def users(self, *jobs: str) -> list[User]:
        return [ledger_user(SECRET, job) for job in jobs]

    @pytest.fixture(autouse=True)
    def _clean(self, ledger: RedisClient) -> Iterator[None]:
        yield
        for name in self.names(ledger):
            ledger.execute_command("ACL", "DELUSER", name)

    def test_those_that_are_wanted_are_there(self, ledger: RedisClient) -> None:
        AclUsers(ledger, EVERY_SCRIPT, 0).keep(self.users("a", "b"))

        assert self.names(ledger) == {"vcasgd-job-a", "vcasgd-job-b"}

    def test_what_a_restart_took_away_is_made_again(self, ledger: RedisClient) -> None:
        access = AclUsers(ledger, EVERY_SCRIPT, 0)
        access.keep(self.users("a"))
        ledger.execute_command("ACL", "DELUSER", "vcasgd-job-a")

        access.keep(self.users("a"))

        assert self.names(ledger) == {"vcasgd-job-a"}

    def test_those_that_are_not_wanted_any_more_go_after_a_while(self, ledger: RedisClient) -> None:
        now = 0.0
        access = AclUsers(ledger, EVERY_SCRIPT, 10.0, lambda: now)
        access.keep(self.users("a", "b"))
        now = 9.0
        access.keep(self.users("b"))
        assert self.names(ledger) == {"vcasgd-job-a", "vcasgd-job-b"}

        now = 11.0
        access.keep(self.users("b"))

        assert self.names(ledger) == {"vcasgd-job-b"}

    def test_those_of_an_earlier_life_go_too(self, ledger: RedisClient) -> None:
        # Given users of jobs of which one ended while nobody looked, and of others
        AclUsers(ledger, EVERY_SCRIPT, 0).keep(self.users("over", "active"))
        AclUsers(ledger, EVERY_SCRIPT, 0).keep([tensors_user(SECRET, "over", "over.w")])
        ledger.execute_command("ACL", "SETUSER", "somebody", "on", "nopass")
        now = 0.0
        access = AclUsers(ledger, EVERY_SCRIPT, 10.0, lambda: now)

        access.adopt(LEDGER_USERS)
        access.keep(self.users("active"))
        now = 9.0
        access.keep(self.users("active"))
        assert "vcasgd-job-over" in self.names(ledger)
        now = 11.0
        access.keep(self.users("active"))

        assert self.names(ledger) == {"vcasgd-job-active", "vcasgd-job-over/over.w", "somebody"}
        access.adopt(TENSORS_USERS)
        now = 22.0
        access.keep(self.users("active"))
        assert self.names(ledger) == {"vcasgd-job-active", "somebody"}

    def test_users_of_others_stay(self, ledger: RedisClient) -> None:
        ledger.execute_command("ACL", "SETUSER", "somebody", "on", "nopass")

        AclUsers(ledger, EVERY_SCRIPT, 0).keep([])

        assert self.names(ledger) == {"somebody"}

    def test_one_that_is_banned_is_thrown_out(
        self, ledger: RedisClient, server: RedisServer
    ) -> None:
        (user,) = self.users("a")
        access = AclUsers(ledger, EVERY_SCRIPT, 1000.0)
        access.keep([user])
        client = connect(user.url(url_of(server, 0)))
        assert client.ping()

        access.keep([], banned=[user.name])

        with pytest.raises((StoreUnavailable, StoreDenied)):
            client.ping()
        with pytest.raises(StoreDenied):
            client.ping()
        client.close()

    def test_changed_rules_count_at_once(self, ledger: RedisClient, server: RedisServer) -> None:
        narrow, wide = (tensors_user(SECRET, "a", "w", first_snapshot=each) for each in (0, 1))
        access = AclUsers(ledger, EVERY_SCRIPT, 0)
        access.keep([wide])
        client = connect(wide.url(url_of(server, 1)))
        client.set(TensorKeys("a").meta, "x")

        access.keep([narrow])

        assert refused(lambda: client.set(TensorKeys("a").meta, "y"))
        access.keep([wide])
        client.set(TensorKeys("a").meta, "z")
        client.close()

    def test_steady_it_asks_and_changes_nothing(self, ledger: RedisClient) -> None:
        access = AclUsers(ledger, EVERY_SCRIPT, 0)
        access.keep(self.users("a", "b"))
        before = commands(ledger)

        access.keep(self.users("a", "b"))

        assert commands(ledger) - before == 2

    def test_a_server_that_lets_nobody_make_users_is_named(
        self, ledger: RedisClient, server: RedisServer
    ) -> None:
        ledger.execute_command("ACL", "SETUSER", "plain", "on", ">pw", "~*", "+@all", "-@admin")
        client = connect(f"redis://plain:pw@127.0.0.1:{server.files.port}/0")

        with pytest.raises(StoreDenied, match="users for the workers") as caught:
            AclUsers(client, EVERY_SCRIPT, 0).keep(self.users("a"))

        assert "VCASGD_JOB_USERS" in str(caught.value.remedy)
        client.close()


def commands(server: RedisClient) -> int:
    stats = server.info("commandstats")
    return sum(
        each["calls"]
        for name, each in stats.items()
        if name.startswith(("cmdstat_acl", "cmdstat_script"))
    )


# --- names and passwords ----------------------------------------------------------------------


def test_passwords_differ_by_server_job_worker_and_secret() -> None:
    passwords = {
        ledger_user(SECRET, "a").password,
        ledger_user(SECRET, "b").password,
        ledger_user("another", "a").password,
        tensors_user(SECRET, "a", "w").password,
        tensors_user(SECRET, "a", "v").password,
        tensors_user(SECRET, "b", "w").password,
        worker_key(SECRET, "a", "w"),
    }
    assert len(passwords) == 7
    assert ledger_user(SECRET, "a").password == ledger_user(SECRET, "a").password


def test_neither_password_nor_secret_is_shown_or_sent() -> None:
    user = tensors_user(SECRET, "a", "w")

    assert user.password not in repr(user)
    assert user.password not in " ".join(user.rules)
    assert SECRET not in json.dumps([user.name, user.password, *user.rules])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:admin@host:6379/1", "redis://{}@host:6379/1"),
        ("redis://root:admin@host/0", "redis://{}@host/0"),
        ("redis://host:6379/0?username=root&password=admin", "redis://{}@host:6379/0"),
        ("unix://:admin@/run/server.sock?db=1", "unix://{}@/run/server.sock?db=1"),
        (
            "rediss://:admin@host:1/0?ssl_ca_certs=/c.pem",
            "rediss://{}@host:1/0?ssl_ca_certs=%2Fc.pem",
        ),
        (
            "redis+sentinel://:admin@a:1,b:2/name/0?replicas=1",
            "redis+sentinel://{}@a:1,b:2/name/0?replicas=1",
        ),
    ],
)
def test_the_url_of_a_user(url: str, expected: str) -> None:
    user = tensors_user(SECRET, "a-23abcd", "a-23abcd.local-1")

    shown = user.url(url)

    assert shown == expected.format(f"vcasgd-job-a-23abcd%2Fa-23abcd.local-1:{user.password}")
    assert "admin" not in shown
