"""Management of the workers' ACL users: creation, deletion, names, and passwords."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
from support.harness import RedisServer
from support.servers import url_of

from vcasgd.errors import StoreDenied, StoreUnavailable
from vcasgd.store.acl import (
    LEDGER_SCRIPTS,
    LEDGER_USERS,
    TENSORS_SCRIPTS,
    TENSORS_USERS,
    AclUsers,
    User,
    ledger_user,
    shard_patterns,
    tensors_user,
    worker_key,
)
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import TensorKeys

pytestmark = pytest.mark.both_servers

SECRET = "a secret of the cluster"
EVERY_SCRIPT = LEDGER_SCRIPTS + TENSORS_SCRIPTS


class TestAclUsers:
    def names(self, server: RedisClient) -> set[str]:
        return {name.decode() for name in server.execute_command("ACL", "USERS")} - {"default"}

    def users(self, *jobs: str) -> list[User]:
        return [ledger_user(SECRET, job) for job in jobs]

    @pytest.fixture(autouse=True)
    def _clean(self, ledger: RedisClient) -> Iterator[None]:
        yield
        for name in self.names(ledger):
            ledger.execute_command("ACL", "DELUSER", name)

    def test_at_most_so_many_users_are_set_at_once(self, ledger: RedisClient) -> None:
        acl_users, users = AclUsers(ledger, EVERY_SCRIPT, 0), self.users("a", "b", "c")

        assert not acl_users.sync(users, most=2)
        assert self.names(ledger) == {"vcasgd-job-a", "vcasgd-job-b"}
        assert acl_users.sync(users, most=2)
        assert len(self.names(ledger)) == 3
        assert acl_users.sync(users, most=0)

    def test_users_lost_in_a_restart_are_created_again(self, ledger: RedisClient) -> None:
        acl_users = AclUsers(ledger, EVERY_SCRIPT, 0)
        acl_users.sync(self.users("a"))
        ledger.execute_command("ACL", "DELUSER", "vcasgd-job-a")

        acl_users.sync(self.users("a"))

        assert self.names(ledger) == {"vcasgd-job-a"}

    def test_users_that_are_no_longer_listed_are_deleted_after_a_delay(
        self, ledger: RedisClient
    ) -> None:
        now = 0.0
        acl_users = AclUsers(ledger, EVERY_SCRIPT, 10.0, clock=lambda: now)
        acl_users.sync(self.users("a", "b"))
        now = 9.0
        acl_users.sync(self.users("b"))
        assert self.names(ledger) == {"vcasgd-job-a", "vcasgd-job-b"}

        now = 11.0
        acl_users.sync(self.users("b"))

        assert self.names(ledger) == {"vcasgd-job-b"}

    def test_users_of_an_earlier_process_are_deleted_too(self, ledger: RedisClient) -> None:
        # Given users of an active job, of a job that ended unnoticed, and of other systems
        AclUsers(ledger, EVERY_SCRIPT, 0).sync(self.users("over", "active"))
        AclUsers(ledger, EVERY_SCRIPT, 0).sync([tensors_user(SECRET, "over", "over.w")])
        ledger.execute_command("ACL", "SETUSER", "someone", "on", "nopass")
        now = 0.0
        acl_users = AclUsers(ledger, EVERY_SCRIPT, 10.0, LEDGER_USERS, lambda: now)

        acl_users.sync(self.users("active"))
        now = 9.0
        acl_users.sync(self.users("active"))
        assert "vcasgd-job-over" in self.names(ledger)
        now = 11.0
        acl_users.sync(self.users("active"))

        assert self.names(ledger) == {"vcasgd-job-active", "vcasgd-job-over/over.w", "someone"}
        AclUsers(ledger, EVERY_SCRIPT, -1, TENSORS_USERS).sync([])
        assert self.names(ledger) == {"vcasgd-job-active", "someone"}

    def test_a_banned_user_is_disconnected(self, ledger: RedisClient, server: RedisServer) -> None:
        (user,) = self.users("a")
        acl_users = AclUsers(ledger, EVERY_SCRIPT, 1000.0)
        acl_users.sync([user])
        client = connect(user.url(url_of(server, 0)))
        assert client.ping()

        acl_users.sync([], banned=[user.name])

        with pytest.raises((StoreUnavailable, StoreDenied)):
            client.ping()
        with pytest.raises(StoreDenied):
            client.ping()
        client.close()

    def test_changed_rules_take_effect_at_once(
        self, ledger: RedisClient, server: RedisServer
    ) -> None:
        narrow, wide = (tensors_user(SECRET, "a", "w", first_snapshot=each) for each in (0, 1))
        acl_users = AclUsers(ledger, EVERY_SCRIPT, 0)
        acl_users.sync([wide])
        client = connect(wide.url(url_of(server, 0)))
        client.set(TensorKeys("a").meta, "x")

        acl_users.sync([narrow])

        with pytest.raises(StoreDenied):
            client.set(TensorKeys("a").meta, "y")
        acl_users.sync([wide])
        client.set(TensorKeys("a").meta, "z")
        client.close()

    def test_without_changes_it_only_reads(self, ledger: RedisClient) -> None:
        acl_users = AclUsers(ledger, EVERY_SCRIPT, 0)
        acl_users.sync(self.users("a", "b"))
        before = commands(ledger)

        acl_users.sync(self.users("a", "b"))

        assert commands(ledger) - before == 2

    def test_a_client_that_may_not_manage_users_is_an_error(
        self, ledger: RedisClient, server: RedisServer
    ) -> None:
        ledger.execute_command("ACL", "SETUSER", "plain", "on", ">pw", "~*", "+@all", "-@admin")
        client = connect(f"redis://plain:pw@127.0.0.1:{server.files.port}/0")

        with pytest.raises(StoreDenied, match="can't manage the Redis users") as caught:
            AclUsers(client, EVERY_SCRIPT, 0).sync(self.users("a"))

        assert "VCASGD_JOB_USERS" in str(caught.value.remedy)
        client.close()


def commands(server: RedisClient) -> int:
    stats = server.info("commandstats")
    return sum(
        each["calls"]
        for name, each in stats.items()
        if name.startswith(("cmdstat_acl", "cmdstat_script"))
    )


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


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (range(1), ["0"]),
        (range(3, 4), ["3"]),
        (range(15), ["[0-9]", "1[0-4]"]),
        (range(8, 21), ["[8-9]", "1[0-9]", "20"]),
        (range(95, 112), ["9[5-9]", "10[0-9]", "11[0-1]"]),
    ],
)
def test_patterns_match_just_the_shards_of_a_node(shards: range, expected: list[str]) -> None:
    patterns = shard_patterns(shards)

    assert patterns == expected
    numbers = [str(number) for number in range(2000)]
    matched = [each for each in numbers if any(fnmatchcase(each, some) for some in patterns)]
    assert matched == [str(shard) for shard in shards]
