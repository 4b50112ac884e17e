"""Readiness probes for parts. Each probe returns within seconds."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx

from vcasgd.errors import StoreUnavailable
from vcasgd.store.connection import RedisClient, check_server, connect
from vcasgd.store.ledger.servers import Control, Servers

#: Seconds for an answer. The supervisor does nothing else meanwhile, but a busy machine easily
#: takes more than one second.
PROBE_SECONDS = 3.0

#: Called with the Unix time at which the part's process started. Raises
#: :class:`~vcasgd.errors.VcasgdError` if the part can never become ready.
Probe = Callable[[float], bool]


def redis_server(name: str, url: str) -> Probe:
    """Return a probe for a supported Redis server that answers.

    The probe raises :class:`~vcasgd.errors.StoreUnsupported` for other servers.
    """
    client = _connect(url)

    def probe(_started_at: float) -> bool:
        try:
            check_server(client, name)
        except StoreUnavailable:
            return False
        return True

    return probe


def replicated_server(name: str, url: str) -> Probe:
    """Return a probe for a primary, or for a replica that has caught up with its primary."""
    client, answers = _connect(url), redis_server(name, url)

    def probe(started_at: float) -> bool:
        if not answers(started_at):
            return False
        try:
            info = client.info("replication")
        except StoreUnavailable:
            return False
        return "master" in info["role"] or "up" in info.get("master_link_status", "")

    return probe


def parameter_server(ledger_url: str, node: str) -> Probe:
    """Return a probe for a parameter server that has sent a heartbeat to the ledger."""
    ledger = _connect(ledger_url)
    servers = Servers(ledger)

    def probe(started_at: float) -> bool:
        try:
            return bool(servers.all().get(node, {}).get("at", 0.0) >= started_at)
        except StoreUnavailable:
            return False

    return probe


def controller(ledger_url: str) -> Probe:
    """Return a probe for a controller that has its lease and has published its pools."""
    control = Control(_connect(ledger_url))

    def probe(started_at: float) -> bool:
        try:
            return control.last_round_at() >= started_at
        except StoreUnavailable:
            return False

    return probe


def listening(host: str, port: int) -> Probe:
    """Return a probe for a port that accepts connections."""

    def probe(_started_at: float) -> bool:
        try:
            socket.create_connection((host, port), PROBE_SECONDS).close()
        except OSError:
            return False
        return True

    return probe


def http(url: str) -> Probe:
    """Return a probe for a URL that answers with status 200."""

    def probe(_started_at: float) -> bool:
        try:
            # trust_env=False: a proxy can't reach this machine's loopback interface.
            return httpx.get(url, timeout=PROBE_SECONDS, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    return probe


def _connect(url: str) -> RedisClient:
    return connect(url, answer_seconds=PROBE_SECONDS)
