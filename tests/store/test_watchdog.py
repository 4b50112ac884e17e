"""A server that an endless script blocks answers again."""

from __future__ import annotations

import threading

import pytest
from support.harness import RedisServer
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import StoreError, StoreUnavailable
from vcasgd.store.connection import connect
from vcasgd.store.quotas import Watchdog

pytestmark = pytest.mark.both_servers


def test_an_endless_script_is_killed(server: RedisServer) -> None:
    client = server.client()
    before = client.config_get("busy-reply-threshold")["busy-reply-threshold"]
    client.config_set("busy-reply-threshold", 100)
    refused = []

    def run_endlessly() -> None:
        try:
            connect(server.url, answer_seconds=PATIENCE).eval("while true do end", 0)
        except StoreError as error:
            refused.append(error.message)

    threading.Thread(target=run_endlessly, daemon=True).start()
    await_truth(lambda: _busy(server))

    watchdog = Watchdog(server.client(), "ledger")
    try:
        watchdog.start()

        await_truth(lambda: refused)
        assert "killed" in refused[0]
        assert client.ping()
    finally:
        # Scripts of later tests, which share the server, may be slow.
        client.config_set("busy-reply-threshold", before)
        watchdog._pause.set()


def _busy(server: RedisServer) -> bool:
    try:
        server.client().ping()
    except StoreUnavailable as error:
        return "BUSY" in error.message
    return False
