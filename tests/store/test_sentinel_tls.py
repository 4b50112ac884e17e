"""``rediss+sentinel://``: real servers and Sentinels that only use TLS.

The Valkey of the wheel is built without TLS, so this runs on the distribution's Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from support.children import Process
from support.ports import free_port
from support.servers import require_binary
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import StoreDenied, StoreError, StoreUnavailable
from vcasgd.local_files import write_private
from vcasgd.store.connection import connect, patiently
from vcasgd.store.embedded import (
    SENTINELS,
    ServerFiles,
    replication_lines,
    sentinel_command,
    server_command,
    write_configuration,
)
from vcasgd.store.sentinel import named_primary, primary_url

PASSWORD = "of-the-servers"
SENTINEL_PASSWORD = "of-the-sentinels"
#: Until a test wants a failover, the primary may be slow.
SLOW_MS, DOWN_MS = 240_000, 500
FAILOVER_SECONDS = 120


class Service:
    """A primary, its replica and three Sentinels; none of them has a port for plain text."""

    def __init__(self, directory: Path) -> None:
        self.binary = require_binary("redis")
        self.directory = directory
        authority = trustme.CA()
        self.authority = directory / "ca.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
        self.ports = [free_port(), free_port()]
        self.sentinel_ports = [free_port() for _ in range(SENTINELS)]
        self.servers = [self._start_server(port) for port in self.ports]
        self.sentinels = [self._start_sentinel(port) for port in self.sentinel_ports]

    def fail_over_soon(self) -> None:
        """Let the Sentinels miss a primary that does not answer for a moment."""
        for port in self.sentinel_ports:
            with redis.Redis(
                *("127.0.0.1", port), password=SENTINEL_PASSWORD,
                ssl=True, ssl_ca_certs=str(self.authority),
            ) as sentinel:  # fmt: skip
                option = ("down-after-milliseconds", DOWN_MS)
                sentinel.execute_command("SENTINEL", "SET", "ledger", *option)

    def end(self) -> None:
        for process in (*self.servers, *self.sentinels):
            process.end()

    def url(self, host: str = "127.0.0.1", **options: object) -> str:
        hosts = ",".join(f"{host}:{port}" for port in self.sentinel_ports)
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return (
            f"rediss+sentinel://:{PASSWORD}@{hosts}/ledger/0"
            f"?sentinel_password={SENTINEL_PASSWORD}&{query}"
        )

    @property
    def trusting(self) -> str:
        return self.url(ssl_ca_certs=self.authority, replicas=1)

    def _start_server(self, port: int) -> Process:
        files = ServerFiles(self.directory / f"server-{port}", port, PASSWORD)
        follow = None if port == self.ports[0] else self.ports[0]
        lines = [*self._tls(port), *replication_lines(PASSWORD, primary_port=follow)]
        write_configuration(files, durable=False, more=lines)
        return Process(server_command(files, self.binary), files.directory / "log")

    def _start_sentinel(self, port: int) -> Process:
        files = ServerFiles(self.directory / f"sentinel-{port}", port, SENTINEL_PASSWORD)
        files.directory.mkdir()
        lines = [
            *self._tls(port),
            f"dir {files.directory}",
            f"requirepass {SENTINEL_PASSWORD}",
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}",
            f"sentinel monitor ledger 127.0.0.1 {self.ports[0]} 2",
            f"sentinel auth-pass ledger {PASSWORD}",
            f"sentinel down-after-milliseconds ledger {SLOW_MS}",
            f"sentinel failover-timeout ledger {6 * DOWN_MS}",
        ]
        write_private(files.configuration, "\n".join([*lines, ""]))
        return Process(sentinel_command(files, self.binary), files.directory / "log")

    def _tls(self, port: int) -> list[str]:
        """Replication and Sentinels use TLS as well."""
        pem = self.directory / "server.pem"
        return [
            "port 0", f"tls-port {port}", "tls-replication yes", "tls-auth-clients no",
            f"tls-cert-file {pem}", f"tls-key-file {pem}", f"tls-ca-cert-file {self.authority}",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("sentinels"))
    try:
        # what is written is on the replica
        with connect(service.trusting) as client:
            await_truth(lambda: write(client, "ready"))
        yield service
    finally:
        service.end()


def write(client: Any, value: str) -> bool:
    try:
        client.set("key", value)
    except StoreUnavailable:
        return False
    return bool(client.replicated)


def failure(url: str) -> StoreError:
    with connect(url, answer_seconds=PATIENCE) as client, pytest.raises(StoreError) as caught:
        client.ping()
    return caught.value


def test_an_unknown_authority_is_refused(service: Service) -> None:
    assert type(failure(service.url())) is StoreDenied


def test_a_host_that_is_not_in_the_certificate_is_refused(service: Service) -> None:
    url = service.url("localhost", ssl_ca_certs=service.authority)

    assert type(failure(url)) is StoreDenied
    # other clients do not trust such a Sentinel either
    assert named_primary(url) is None


def test_plain_text_to_sentinels_that_speak_tls(service: Service) -> None:
    url = service.url().replace("rediss+", "redis+")

    assert isinstance(failure(url), StoreUnavailable)


def test_the_address_for_those_who_know_no_sentinel(service: Service) -> None:
    address = primary_url(service.trusting)

    assert address is not None
    assert address.startswith(f"rediss://:{PASSWORD}@127.0.0.1:{service.ports[0]}/0?")
    with connect(address) as client:
        assert client.ping()


def test_a_failover(service: Service) -> None:
    client = connect(service.trusting)
    await_truth(lambda: client.set("before", 1) and client.replicated)

    service.servers[0].kill()
    service.fail_over_soon()

    # Then acknowledged writes are on the other server, which the Sentinels now name
    await_truth(lambda: named_primary(service.trusting) == ("127.0.0.1", service.ports[1]))
    assert patiently(lambda: client.get("before"), FAILOVER_SECONDS) == b"1"
    client.close()
