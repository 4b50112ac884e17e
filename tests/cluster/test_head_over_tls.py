"""Ray's head with a ledger over TLS."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import Process, RedisServer
from support.ports import free_port
from support.servers import TlsServer, require_binary

from vcasgd.cluster.head import head_command
from vcasgd.settings import Settings
from vcasgd.store.connection import connect


@pytest.mark.slow
def test_head_keeps_its_state_in_a_ledger_over_tls(
    tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    ledger = RedisServer(tmp_path / "ledger", durable=True, binary=require_binary("redis"))
    tls = TlsServer(ledger, tmp_path)
    client = connect(tls.url(ssl_ca_certs=tls.authority))
    with tempfile.TemporaryDirectory(prefix="vc-", dir="/tmp") as scratch:
        command = head_command(
            Settings(cluster="over-tls", heartbeat=1.0),
            address=f"127.0.0.1:{free_port()}",
            ledger_url=tls.url(ssl_ca_certs=tls.authority),
            temp_dir=Path(scratch),
            token="a-token-that-is-long-enough",
        )
        assert command is not None
        head = Process(list(command.argv), tmp_path / "head.log", command.env)
        try:
            eventually(lambda: not head.alive or client.keys("*over-tls*"))
            assert head.alive, (tmp_path / "head.log").read_text()[-3000:]
            assert client.keys("*over-tls*")
        finally:
            head.end()
            client.close()
            ledger.end()
