"""Start of a head, over TLS, too, and its exit when its control service or its ledger fails."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.children import Process
from support.harness import RedisServer
from support.ports import free_port
from support.servers import TlsServer, require_binary
from support.waiting import await_truth

from vcasgd.cluster.head import head_command
from vcasgd.settings import Settings
from vcasgd.store.connection import connect
from vcasgd.store.embedded import replication_lines

pytestmark = pytest.mark.slow


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "ledger", durable=True)
    yield server
    server.end()


@pytest.fixture
def start_head(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    with tempfile.TemporaryDirectory(prefix="v", dir="/tmp") as scratch:
        heads: list[Process] = []

        def start(ledger_url: str) -> Process:
            command = head_command(
                Settings(cluster="of-this-test", heartbeat=1.0),
                address=f"127.0.0.1:{free_port()}",
                ledger_url=ledger_url,
                temp_dir=Path(scratch),
                token="a-token-that-is-long-enough",
            )
            assert command is not None
            heads.append(Process(list(command.argv), tmp_path / "head.log", command.env))
            return heads[-1]

        yield start
        for head in heads:
            head.end()


def part(head: Process, name: str) -> psutil.Process | None:
    for child in psutil.Process(head.pid).children():
        with suppress(psutil.Error):
            if child.name() == name:
                return child
    return None


def test_head_exits_if_its_control_service_dies_during_the_start(
    ledger: RedisServer, start_head: Callable[[str], Process], tmp_path: Path
) -> None:
    # Given a head whose node is not registered yet
    head = start_head(ledger.url)
    raylet = await_truth(lambda: part(head, "raylet"), interval=0.005)
    raylet.suspend()
    control = part(head, "gcs_server")
    assert control is not None
    assert control.is_running()

    # When its control service is killed
    control.kill()

    # Then it exits, so that it can be restarted, and leaves no process behind
    assert head.wait() == 1
    assert "Ray's control service died" in (tmp_path / "head.log").read_text()
    await_truth(lambda: not raylet.is_running())


@pytest.mark.extended
def test_head_exits_if_its_ledger_is_no_longer_the_primary(
    ledger: RedisServer, start_head: Callable[[str], Process], tmp_path: Path
) -> None:
    # Given a server that was the primary and is a replica now
    lines = replication_lines(ledger.files.password, primary_port=ledger.files.port)
    replica = RedisServer(
        tmp_path / "replica", durable=True, more=lines, password=ledger.files.password
    )
    try:
        await_truth(lambda: replica.connection.info("replication")["role"] == "slave")

        # Then the head exits
        assert start_head(replica.url).wait() == 1
        assert "READONLY" in (tmp_path / "head.log").read_text()
    finally:
        replica.end()


def test_head_keeps_its_state_in_a_ledger_over_tls(
    start_head: Callable[[str], Process], tmp_path: Path
) -> None:
    ledger = RedisServer(tmp_path / "ledger", durable=True, binary=require_binary("redis"))
    tls = TlsServer(ledger, tmp_path)
    client = connect(tls.url(ssl_ca_certs=tls.authority))
    try:
        head = start_head(tls.url(ssl_ca_certs=tls.authority))
        await_truth(lambda: not head.alive or client.keys("*of-this-test*"))
        assert head.alive, (tmp_path / "head.log").read_text()[-3000:]
        assert client.keys("*of-this-test*")
    finally:
        client.close()
        ledger.end()
