"""Errors of servers and networks become our own exceptions."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.harness import RedisServer
from support.waiting import PATIENCE

from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsupported,
)
from vcasgd.store import connection
from vcasgd.store.connection import (
    RedisClient,
    check_server,
    connect,
    patiently,
    without_secret,
)

pytestmark = pytest.mark.both_servers


def test_a_server_starts_in_a_folder_with_spaces_and_quotes(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / 'é "1" #2 50%25', durable=True)
    try:
        with connect(server.files.nearest_url) as near:
            assert near.ping()
        assert server.files.socket
        assert server.files.socket.is_socket()
    finally:
        server.end()


# --- servers that exist only on the wire ------------------------------------------------------


@contextmanager
def scripted_server(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer each command with the bytes that ``answer`` returns."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            near, _ = listener.accept()
            with near:
                while received := near.recv(65536):
                    # commands of a pipeline come together: each starts with its length
                    for _ in range(sum(line[:1] == b"*" for line in received.split(b"\r\n"))):
                        near.sendall(answer(received))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def bulk(text: str) -> bytes:
    return f"${len(text)}\r\n{text}\r\n".encode()


@contextmanager
def server_that_says(line: str) -> Iterator[RedisClient]:
    def answer(command: bytes) -> bytes:
        return b"+OK\r\n" if b"SETINFO" in command else f"-{line}\r\n".encode()

    with scripted_server(answer) as url:
        client = connect(url)
        yield client
        client.close()


class TestAnswers:
    @pytest.mark.parametrize(
        ("line", "ours"),
        [
            ("LOADING Redis is loading the dataset in memory", StoreUnavailable),
            ("BUSY Redis is busy running a script", StoreUnavailable),
            ("MASTERDOWN Link with MASTER is down", StoreUnavailable),
            ("READONLY You can't write against a read only replica.", StoreUnavailable),
            ("TRYAGAIN Multiple keys request during rehashing of slot", StoreUnavailable),
            ("CLUSTERDOWN The cluster is down", StoreUnavailable),
            ("MISCONF Errors writing to the AOF file: No space left on device", StoreUnavailable),
            ("ERR max number of clients reached", StoreUnavailable),
            ("OOM command not allowed when used memory > 'maxmemory'.", StoreFull),
            ("NOAUTH Authentication required.", StoreDenied),
            ("WRONGPASS invalid username-password pair or user is disabled.", StoreDenied),
            ("NOPERM this user has no permissions to access one of the keys", StoreDenied),
            ("FENCED subtask 3 has a newer lease", Fenced),
            ("NOSNAPSHOT", SnapshotMissing),
            ("ERR unknown command", StoreError),
            ("ASK 1 127.0.0.1:7000", StoreError),
        ],
    )
    @pytest.mark.parametrize("pipelined", [False, True], ids=["alone", "in a pipeline"])
    def test_an_answer_means_the_same_alone_and_in_a_pipeline(
        self, line: str, ours: type[StoreError], pipelined: bool
    ) -> None:
        with server_that_says(line) as client:
            ask = client.pipeline().set("a", 1).execute if pipelined else client.ping
            with pytest.raises(StoreError) as caught:
                ask()

        assert type(caught.value) is ours

    def test_what_the_library_refuses_is_an_error_too(self) -> None:
        with server_that_says("never asked") as client, pytest.raises(StoreError) as caught:
            client.set("a", object())

        assert type(caught.value) is StoreError

    def test_silence_is_a_lost_connection(self) -> None:
        with scripted_server(lambda _: b"") as url:
            client = connect(url, answer_seconds=0.1)
            with pytest.raises(StoreUnavailable):
                client.ping()
            client.close()


class TestRealServer:
    def test_a_script_that_is_lost_once_more_after_it_was_loaded_is_an_outage(
        self, ledger: RedisClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = ledger.script_load

        def load_before_a_restart(text: str) -> str:
            digest: str = load(text)
            ledger.script_flush()
            return digest

        ledger.script_flush()
        script = ledger.script("ledger/new_token")
        monkeypatch.setattr(ledger, "script_load", load_before_a_restart)
        with pytest.raises(StoreUnavailable):
            script(keys=["tokens"], args=["node-0", 1])
        monkeypatch.undo()
        assert script(keys=["tokens"], args=["node-0", 1])

    def test_a_full_server_accepts_what_may_exceed_the_limit(self, server: RedisServer) -> None:
        client, reader = connect(server.url, over_limit=True), server.connection
        server.connection.config_set("maxmemory", "1")
        try:
            assert client.set("a", 1)
            fields = {str(number): number for number in range(5000)}
            for transaction in (False, True):
                with client.pipeline(transaction=transaction) as pipe:
                    pipe.hset("hash", mapping=fields)
                    pipe.sadd("set", "b")
                    pipe.hmget("hash", "7", "none")
                    pipe.smembers("set")
                    *_, fields_read, members = pipe.execute()
                assert len(client.hgetall("hash")) == 5000
                # Outside of a transaction, only the refused commands are repeated, at its end
                if transaction:
                    assert (fields_read, members) == ([b"7", None], {b"b"})
                client.delete("hash", "set")
            assert reader.pipeline(transaction=True).hgetall("none").execute() == [{}]
            with pytest.raises(StoreFull):
                reader.pipeline(transaction=True).set("a", 1).execute()
            with pytest.raises(StoreFull):
                client.xadd("stream", {"a": 1})
            for transaction in (False, True):
                pipe = client.pipeline(transaction=transaction).xadd("stream", {"a": 1})
                with pytest.raises(StoreFull):
                    pipe.execute()
        finally:
            server.connection.config_set("maxmemory", "0")
            client.flushall()

    def test_one_that_throws_keys_away_is_refused(self, ledger: RedisClient) -> None:
        ledger.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(StoreUnsupported, match=r"tensors server.*allkeys-lru") as caught:
                check_server(ledger, "tensors")
        finally:
            ledger.config_set("maxmemory-policy", "noeviction")
        assert "noeviction" in str(caught.value.remedy)

    def test_another_database_is_refused(self, tensors: RedisClient) -> None:
        """Workers may not use it: quotas look at one database only."""
        with pytest.raises(StoreUnsupported, match="tensors server names database 1"):
            check_server(tensors, "tensors")


@pytest.mark.parametrize("version", ["6.2.0", "2.8"])
def test_an_old_server_is_refused(version: str) -> None:
    def answer(command: bytes) -> bytes:
        return bulk(f"redis_version:{version}\r\n") if b"INFO" in command else b"+OK\r\n"

    with scripted_server(answer) as url:
        client = connect(url)
        with pytest.raises(StoreUnsupported, match=version):
            check_server(client, "ledger")
        client.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://host:6379/0"),
        ("rediss://user:secret@host/1", "rediss://host/1"),
        (
            "rediss://:secret@host/0?ssl_keyfile=/k.pem&ssl_password=secret",
            "rediss://host/0?ssl_keyfile=%2Fk.pem",
        ),
        ("redis://:se@cret@host:6379/0", "redis://host:6379/0"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("unix://:secret@/run/redis.sock", "unix:/run/redis.sock"),
        ("redis://host/0?password=secret", "redis://host/0"),
        (
            "redis://host/0?password=secret&username=user&protocol=2",
            "redis://host/0?protocol=2",
        ),
    ],
)
def test_a_url_is_shown_without_user_and_password(url: str, shown: str) -> None:
    # a URL without a host may be written with two slashes or none
    assert without_secret(url).replace("unix:///", "unix:/") == shown


class TestPatiently:
    def test_tries_again_until_it_works(self) -> None:
        outcomes: list[Exception | str] = [StoreUnavailable("gone"), StoreFull("full"), "there"]

        def call() -> str:
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        assert patiently(call, PATIENCE, first_pause=0.001) == "there"

    @pytest.mark.parametrize("error", [StoreDenied, Fenced, SnapshotMissing, StoreError])
    def test_what_waiting_does_not_heal_is_raised_at_once(self, error: type[StoreError]) -> None:
        calls = []

        def call() -> None:
            calls.append(1)
            raise error("no")

        with pytest.raises(error):
            patiently(call, 5)
        assert len(calls) == 1

    def test_gives_up_in_time_with_the_last_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, now = [], [0.0]

        def call() -> None:
            calls.append(1)
            now[0] += 0.01
            raise StoreUnavailable(f"attempt {len(calls)}")

        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None)
        monkeypatch.setattr(connection, "time", clock)
        with pytest.raises(StoreUnavailable, match=r"attempt \d+") as caught:
            patiently(call, 0.2, first_pause=0.01)

        assert caught.value.message == f"attempt {len(calls)}"
        assert len(calls) > 1
