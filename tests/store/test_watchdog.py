"""A server that an endless script blocks answers again."""

from __future__ import annotations

import threading

import pytest
from support.harness import RedisServer
from support.waiting import await_truth

from vcasgd.errors import StoreError, StoreUnavailable
from vcasgd.store.quotas import Watchdog

pytestmark = pytest.mark.both_servers


def test_an_endless_script_is_killed(server: RedisServer) -> None:
    client = server.client()
    client.config_set("busy-reply-threshold", 100)
    refused = []

    def run_endlessly() -> None:
        try:
            server.client().eval("while true do end", 0)
        except StoreError as error:
            refused.append(error.message)

    threading.Thread(target=run_endlessly, daemon=True).start()
    await_truth(lambda: _busy(server))

    Watchdog(server.client(), "ledger").start()

    await_truth(lambda: refused)
    assert "killed" in refused[0]
    assert client.ping()


def _busy(server: RedisServer) -> bool:
    try:
        server.client().ping()
    except StoreUnavailable as error:
        return "BUSY" in error.message
    return False
