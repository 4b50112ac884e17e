"""Servers behind Redis Sentinel: real Sentinels, replicas and failovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from support.replicated import Replicated, replicated
from support.servers import KINDS
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import StoreError, StoreUnavailable
from vcasgd.store.bulk_transfer import BulkTransfer
from vcasgd.store.connection import RedisClient, connect, patiently, without_secret
from vcasgd.store.sentinel import SentinelUrl

#: Longest time of a failover.
FAILOVER_SECONDS = 120


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def service(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    with replicated(tmp_path_factory.mktemp("service") / "tensors", kind) as service:
        yield service


@pytest.fixture(scope="module")
def steady(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    """A service whose primary stays the primary, however slow it is."""
    options = {"down_seconds": PATIENCE, "replica_timeout": PATIENCE}
    with replicated(tmp_path_factory.mktemp("steady") / "tensors", kind, **options) as service:
        yield service


@pytest.fixture(scope="module")
def lenient(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    """A service whose primary stays the primary, and accepts writes without a replica."""
    options = {"strict": False, "down_seconds": PATIENCE}
    with replicated(tmp_path_factory.mktemp("lenient") / "tensors", kind, **options) as service:
        yield service


def short_of(service: Replicated) -> RedisClient:
    """Return a client that waits for the replica for a moment, and whose last write is there."""
    client = connect(service.url.replace("replica_timeout=2.0", "replica_timeout=0.3"))
    await_truth(lambda: client.set("key", 1) and client.replicated)
    return client


class Writer(threading.Thread):
    """Writer of increasing numbers that records the acknowledged ones."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(name="writer", daemon=True)
        self._client = client
        self._stopped = threading.Event()
        self.acknowledged: list[int] = []
        self.failures = 0

    def run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            try:
                self._client.sadd("numbers", number)
                self.acknowledged.append(number)
            except StoreUnavailable:
                # it may have been written; what counts is that it was not acknowledged
                self.failures += 1
                time.sleep(0.02)
            number += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join(FAILOVER_SECONDS)
        assert not self.is_alive()

    def lost(self, client: RedisClient) -> set[int]:
        return set(self.acknowledged) - {int(each) for each in client.smembers("numbers")}


# --- URLs -----------------------------------------------------------------------------------


class TestUrl:
    def test_all_of_it(self) -> None:
        url = SentinelUrl.parse(
            "redis+sentinel://user:p%40ss@one:1,[::1]:2,three/tensors/3"
            "?sentinel_username=guard&sentinel_password=s&client_name=me"
        )

        assert url.hosts == (("one", 1), ("::1", 2), ("three", 26379))
        assert (url.service, url.tls) == ("tensors", False)
        assert url.options == {"username": "user", "password": "p@ss", "db": 3, "client_name": "me"}
        assert url.sentinel_options == {"username": "guard", "password": "s", "ssl": False}

    def test_over_tls_the_sentinels_are_checked_in_the_same_way(self) -> None:
        url = SentinelUrl.parse("rediss+sentinel://h/tensors?ssl_ca_certs=/ca.pem")

        assert url.tls
        assert url.options["ssl_ca_certs"] == url.sentinel_options["ssl_ca_certs"] == "/ca.pem"
        assert url.sentinel_options["ssl"]

    @pytest.mark.parametrize(
        "url",
        [
            "redis+sentinel://host:26379",
            "redis+sentinel://host:26379/",
            "redis+sentinel:///tensors",
            "redis+sentinel://host:port/tensors",
            "redis+sentinel://one,/tensors",
            "redis+sentinel://host/tensors?replicas=many",
            "redis+sentinel://host/tensors?replicas=-1",
            "redis://host?replicas=1&replica_timeout=0",
        ],
    )
    def test_one_that_cannot_be_used_is_refused_without_showing_it(self, url: str) -> None:
        with pytest.raises(StoreError, match="is invalid") as refused:
            connect(url.replace("://", "://:hidden@"))
        assert "hidden" not in str(refused.value)

    def test_no_secret_is_shown(self) -> None:
        url = "redis+sentinel://u:secret@a:1,b:2/t/0?replicas=1&sentinel_password=secret"

        assert without_secret(url) == "redis+sentinel://a:1,b:2/t/0?replicas=1"
        assert "secret" not in repr(SentinelUrl.parse(url.replace("replicas=1&", "")))
        assert "secret" not in repr(connect(url))


# --- acknowledged means replicated --------------------------------------------------------------


def test_a_write_is_on_the_replica_when_it_returns(steady: Replicated) -> None:
    # It waits for the replica for half as long as for an answer.
    client = connect(steady.url, answer_seconds=2 * PATIENCE)
    replica = steady.replica.connection
    script = client.script("tensors/takeover")
    for number in range(50):
        client.set("key", number)
        assert replica.get("key") == b"%d" % number
        with client.pipeline(transaction=bool(number % 2)) as pipe:
            pipe.hset("hash", "field", number)
            pipe.get("key")
            assert pipe.execute()[1] == b"%d" % number
        assert replica.hget("hash", "field") == b"%d" % number
        script(keys=["fence"], args=[number])
        assert replica.get("fence") == b"%d" % number
    assert client.replicated


def test_nothing_that_was_acknowledged_is_lost_in_a_failover(service: Replicated) -> None:
    writer = Writer(service.client())
    writer.start()
    await_truth(lambda: writer.acknowledged)

    old, new = service.kill_primary()
    service.restart(old)

    # Then the next writes go to the new primary, by themselves
    before = len(writer.acknowledged)
    service.await_primary(new)
    patiently(lambda: service.connection.set("now", 1), FAILOVER_SECONDS)
    while len(writer.acknowledged) == before:
        time.sleep(0.01)
    writer.stop()

    assert writer.failures, "the fault was not felt"
    assert service.role(old) == "slave"
    assert writer.lost(service.connection) == set()


def test_a_frozen_primary_is_not_written_to_when_it_wakes_up(service: Replicated) -> None:
    # Given connections to a primary that freezes
    client = connect(f"{service.url}&client_name=awake", answer_seconds=1.0)
    patiently(lambda: client.set("before", 1), FAILOVER_SECONDS)
    sleepy = connect(service.url)
    sleepy.ping()
    old, new = service.primary, service.replica
    old.process.freeze()

    service.await_primary(new)
    with pytest.raises(StoreUnavailable):
        client.set("after", 1)

    # and it wakes up while a client still has a connection to it
    old.process.thaw()
    sent = patiently(lambda: sleepy.set("late", 1), FAILOVER_SECONDS)

    # Then acknowledged writes are on the new primary, and the old one follows it
    assert sent
    assert new.connection.get("late") == b"1"
    service.await_replica(old)
    patiently(lambda: client.set("after", 1), FAILOVER_SECONDS)
    assert new.connection.get("before") == new.connection.get("after") == b"1"
    assert old.connection.get("after") == b"1"


# --- the replica is away ------------------------------------------------------------------------


def test_without_its_replica_it_goes_on_and_says_so(
    lenient: Replicated, caplog: pytest.LogCaptureFixture
) -> None:
    client, replica = short_of(lenient), lenient.replica
    caplog.clear()

    replica.kill()
    started = time.time()
    client.set("key", 2)

    assert client.replication is not None
    since = client.replication.unreplicated_since
    assert since is not None
    assert started <= since <= time.time()
    assert not client.replicated
    assert "unreplicated: 0 of 1 replicas answered" in caplog.text

    # and when it is back they are replicated again
    replica.start()

    def is_back() -> bool:
        client.set("key", 3)
        return client.replicated

    await_truth(is_back)
    assert replica.connection.get("key") == b"3"
    assert "replicated again" in caplog.text


def test_a_missing_replica_is_tolerated_only_if_the_sentinels_agree(lenient: Replicated) -> None:
    """A client without contact to the Sentinels does not trust its primary.

    The last test of this service, of which it leaves little.
    """
    client = short_of(lenient)
    transfer = BulkTransfer(client)
    transfer.store([(name, memoryview(b"12345678")) for name in ("a", "b")])
    for sentinel in lenient.sentinels[:2]:
        sentinel.kill()
    assert connect(lenient.url).set("key", 1), "one Sentinel is enough to find the primary"
    lenient.nodes[1].kill()
    loading = transfer.load(["a", "b"], [memoryview(bytearray(8)) for _ in range(2)])
    next(loading)

    with pytest.raises(StoreUnavailable, match="may no longer be the primary"):
        client.set("key", 2)
    assert client.replicated, "what is acknowledged is still on the replica"
    assert list(loading) == [1], "connections of other threads are theirs to close"


def test_a_strict_primary_takes_no_write_without_a_replica(steady: Replicated) -> None:
    replica = steady.replica
    steady.connection.set("key", 1)
    replica.kill()

    def refusal() -> str:
        try:
            steady.connection.set("key", 2)
        except StoreUnavailable as error:
            return str(error)
        return ""

    assert "NOREPLICAS" in await_truth(refusal)

    replica.start()
    assert patiently(lambda: steady.connection.set("key", 3), FAILOVER_SECONDS)


def test_nobody_knows_the_service(steady: Replicated) -> None:
    url = steady.url.replace("/tensors/", "/other/")

    with pytest.raises(StoreUnavailable, match="no Sentinel knows a primary of 'other'"):
        connect(url).ping()
