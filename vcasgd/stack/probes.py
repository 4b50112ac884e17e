"""Whether a part is ready. Each probe answers within seconds."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx

from vcasgd.errors import StoreUnavailable
from vcasgd.store.connection import RedisClient, check_server, connect
from vcasgd.store.ledger.servers import Control, Servers

#: the supervisor does nothing else while it waits for an answer; on a machine that is busy with
#: other things a second is soon over
PROBE_SECONDS = 3.0

#: given the Unix time at which the part's process was started; raises
#: :class:`~vcasgd.errors.VcasgdError` when the part will never be ready
Probe = Callable[[float], bool]


def redis_server(name: str, url: str) -> Probe:
    """Answers, and is one that we can use; else :class:`~vcasgd.errors.StoreUnsupported`."""
    client = _connect(url)

    def probe(_started_at: float) -> bool:
        try:
            check_server(client, name)
        except StoreUnavailable:
            return False
        return True

    return probe


def member(name: str, url: str) -> Probe:
    """As :func:`redis_server`; as a replica it must also have all that the primary has."""
    client, answers = _connect(url), redis_server(name, url)

    def probe(started_at: float) -> bool:
        if not answers(started_at):
            return False
        try:
            found = client.info("replication")
        except StoreUnavailable:
            return False
        return "master" in found["role"] or "up" in found.get("master_link_status", "")

    return probe


def parameter_server(ledger_url: str, node: str) -> Probe:
    """Has reported itself to the ledger."""
    ledger = _connect(ledger_url)
    servers = Servers(ledger)

    def probe(started_at: float) -> bool:
        try:
            return bool(servers.all().get(node, {}).get("at", 0.0) >= started_at)
        except StoreUnavailable:
            return False

    return probe


def controller(ledger_url: str) -> Probe:
    """Has the lease, and has told what there is to buy: nothing can be planned before."""
    control = Control(_connect(ledger_url))

    def probe(started_at: float) -> bool:
        try:
            return control.looked_at() >= started_at
        except StoreUnavailable:
            return False

    return probe


def listening(host: str, port: int) -> Probe:
    """Accepts connections."""

    def probe(_started_at: float) -> bool:
        try:
            socket.create_connection((host, port), PROBE_SECONDS).close()
        except OSError:
            return False
        return True

    return probe


def http(url: str) -> Probe:
    """Answers with status 200."""

    def probe(_started_at: float) -> bool:
        try:
            # a proxy that is set for the outside world knows nothing of our loopback
            return httpx.get(url, timeout=PROBE_SECONDS, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    return probe


def _connect(url: str) -> RedisClient:
    return connect(url, answer_seconds=PROBE_SECONDS)
