"""Bulk over a socket of its own: against real servers, and against what goes wrong on the way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from support.harness import RedisServer
from support.servers import KINDS, running_server, url_of
from support.waiting import PATIENCE

from vcasgd.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable
from vcasgd.store.bulk_transfer import BulkTransfer, Missing, WrongLength
from vcasgd.store.connection import RedisClient, connect, patiently

SIZES = (0, 1, 9, 10, 4096, (1 << 20) - 1, 1 << 20, 3 << 20)


@pytest.fixture(params=["tcp", "unix"])
def client(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[RedisClient]:
    url = url_of(server, 1) if request.param == "tcp" else server.files.nearest_url
    client = connect(url, answer_seconds=10.0)
    client.flushdb()
    yield client
    client.close()


def load(wire: BulkTransfer, keys: list[str], sizes: list[int]) -> list[bytes]:
    targets = [bytearray(size) for size in sizes]
    assert list(wire.load(keys, [memoryview(each) for each in targets])) == list(range(len(keys)))
    return [bytes(each) for each in targets]


def test_what_is_stored_is_loaded(client: RedisClient) -> None:
    wire = BulkTransfer(client)
    values = {f"k{size}": os.urandom(size) for size in SIZES}

    wire.store((key, memoryview(value)) for key, value in values.items())

    assert load(wire, list(values), list(SIZES)) == list(values.values())
    assert {key: client.get(key) for key in values} == values
    assert client.ttl("k1") == -1
    assert client.bulk_received == sum(SIZES)


def test_a_large_model_is_no_unread_answer(server: RedisServer) -> None:
    """Its reader is slower than the server, which never has more than some strings under way."""
    with closing(connect(server.files.nearest_url, answer_seconds=10.0)) as client:
        client.config_set("client-output-buffer-limit", "normal 33554432 0 0")
        wire, keys, target = BulkTransfer(client), [f"k{number}" for number in range(96)], 1 << 20
        wire.store((key, memoryview(bytes(target))) for key in keys)
        memory = memoryview(bytearray(target))
        for _ in wire.load(keys, [memory] * len(keys)):
            time.sleep(0.005)
        client.flushdb()
        client.config_set("client-output-buffer-limit", "normal 0 0 0")


@pytest.mark.parametrize("index", [0, 1, 7])
def test_a_missing_string_is_named_and_the_next_call_works(client: RedisClient, index: int) -> None:
    wire, keys = BulkTransfer(client), [f"k{each}" for each in range(8)]
    wire.store((key, memoryview(b"v" * 5000)) for key in keys)
    client.delete(keys[index])

    with pytest.raises(Missing) as caught:
        load(wire, keys, [5000] * 8)

    assert caught.value.index == index
    client.set(keys[index], b"v" * 5000)
    assert load(wire, keys, [5000] * 8) == [b"v" * 5000] * 8


@pytest.mark.parametrize("found", [0, 1, 4999, 5001, 50_000, 2_000_000])
def test_a_string_of_another_length_is_refused(client: RedisClient, found: int) -> None:
    wire = BulkTransfer(client)
    client.mset({"a": b"a" * 5000, "b": bytes(found), "c": b"c" * 5000})

    with pytest.raises(WrongLength, match=f"{found} bytes") as caught:
        load(wire, ["a", "b", "c"], [5000] * 3)

    assert caught.value.index == 1
    assert load(wire, ["a"], [5000]) == [b"a" * 5000]


def test_a_reader_that_stops_in_between_disturbs_nobody(client: RedisClient) -> None:
    wire = BulkTransfer(client)
    wire.store((f"k{each}", memoryview(b"%d" % each * 5000)) for each in range(8))

    reading = wire.load(["k0", "k1", "k2"], [memoryview(bytearray(5000)) for _ in range(3)])
    assert next(reading) == 0
    reading.close()

    assert load(wire, ["k5"], [5000]) == [b"5" * 5000]


def test_connections_that_were_closed_together_are_made_anew(client: RedisClient) -> None:
    """As after a failover, when everything that leads to the old primary is dropped."""
    wire = BulkTransfer(client)
    wire.store([("k", memoryview(b"before"))])

    client.connection_pool.disconnect()

    wire.store([("k", memoryview(b"after!"))])
    assert load(wire, ["k"], [6]) == [b"after!"]


def test_several_threads_at_once(client: RedisClient) -> None:
    wire, before = BulkTransfer(client), client.info("clients")["connected_clients"]

    def work(name: int) -> None:
        value = b"%d" % name * 100_000
        keys = [f"{name}:{index}" for index in range(20)]
        for _ in range(5):
            wire.store((key, memoryview(value)) for key in keys)
            assert load(wire, keys, [100_000] * 20) == [value] * 20

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(1, 7)))

    assert client.info("clients")["connected_clients"] <= before + 6


class TestErrors:
    def test_a_full_server(self, client: RedisClient) -> None:
        wire = BulkTransfer(client)
        client.config_set("maxmemory", "4mb")
        try:
            with pytest.raises(StoreFull):
                wire.store((f"k{each}", memoryview(bytes(1 << 20))) for each in range(16))
        finally:
            client.config_set("maxmemory", "0")
        client.flushdb()
        wire.store([("k", memoryview(b"v"))])
        assert client.get("k") == b"v"

    def test_a_user_who_may_not(self, client: RedisClient, server: RedisServer) -> None:
        client.acl_setuser("reader", enabled=True, passwords=["+secret"], keys=["mine:*"],
                           commands=["+get"])  # fmt: skip
        url = f"redis://reader:secret@127.0.0.1:{server.files.port}/0"
        other = connect(url, answer_seconds=10.0)

        with pytest.raises(StoreDenied, match=r"(?i)set"):
            BulkTransfer(other).store([("mine:k", memoryview(b"v"))])
        with pytest.raises(StoreDenied):
            load(BulkTransfer(other), ["yours:k"], [5])
        other.close()
        client.acl_deluser("reader")


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_was_restarted_is_found_again(kind: str, tmp_path: Path) -> None:
    with running_server(kind, tmp_path) as server:
        client = connect(url_of(server, 1), answer_seconds=10.0)
        wire = BulkTransfer(client)
        wire.store([("k", memoryview(b"before"))])

        server.kill()
        with pytest.raises(StoreUnavailable):
            wire.store([("k", memoryview(b"away"))])
        server.start()
        wire.store([("k", memoryview(b"after!"))])

        assert load(wire, ["k"], [6]) == [b"after!"]
        client.close()


def test_a_frozen_server_is_waited_for_a_bounded_time(tmp_path: Path) -> None:
    with running_server("valkey", tmp_path) as server:
        client = connect(url_of(server, 1), answer_seconds=1.5)
        wire = BulkTransfer(client)
        patiently(lambda: wire.store([("k", memoryview(b"value"))]), PATIENCE)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match="too long"):
                load(wire, ["k"], [5])
            with pytest.raises(StoreError):
                wire.store((f"k{each}", memoryview(bytes(1 << 20))) for each in range(16))
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert patiently(lambda: load(wire, ["k"], [5]), PATIENCE) == [b"value"]
        client.close()
