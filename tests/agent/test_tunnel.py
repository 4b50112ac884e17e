"""Sockets that lead to the servers behind a gateway."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from support.ports import free_port

from vcasgd.agent import connection as module
from vcasgd.agent.connection import GatewayAddress, Tunnel
from vcasgd.errors import StackError


def test_tunnel_without_sockets_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.5)
    port, tls = free_port(), ssl.create_default_context()
    gateway = GatewayAddress(f"https://127.0.0.1:{port}", "127.0.0.1", port, tls, tls)
    tunnel = Tunnel(gateway, "token", ["ledger"], tmp_path / "missing")
    tunnel.start()

    with pytest.raises(StackError, match="the sockets for workers are gone"):
        tunnel.await_ready()

    with pytest.raises(StackError, match="the sockets for workers are gone"):
        tunnel.check()
    assert "FileNotFoundError" in caplog.text
    tunnel.stop()
