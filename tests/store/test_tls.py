"""TLS to a real server: verification, and errors.

The Valkey of the wheel is built without TLS, so these tests run on the distribution's Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.servers import TlsServer, running_server
from support.waiting import PATIENCE

from vcasgd.errors import StoreDenied, StoreError, StoreUnavailable
from vcasgd.store.connection import check_server, connect
from vcasgd.store.sentinel import ServerAddress, address_of


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    directory = tmp_path_factory.mktemp("tls")
    with running_server("redis", directory / "server") as server:
        yield TlsServer(server, directory)


@pytest.fixture
def tls(running: TlsServer) -> TlsServer:
    running.ask_clients_for_certificates(False)
    return running


def failure(url: str, answer_seconds: float = PATIENCE) -> StoreError:
    client = connect(url, answer_seconds=answer_seconds)
    with pytest.raises(StoreError) as caught:
        check_server(client, "ledger")
    client.close()
    return caught.value


@pytest.mark.parametrize(
    ("url", "kind", "message", "remedy"),
    [
        (lambda tls: tls.url(ssl_ca_certs=tls.stranger), StoreDenied, "is not accepted",
         "ssl_ca_certs"),
        # Without a named authority, the system's are asked
        (lambda tls: tls.url(), StoreDenied, "is not accepted", "ssl_ca_certs"),
        (lambda tls: tls.url("localhost", ssl_ca_certs=tls.authority), StoreDenied, "localhost",
         "a host that it covers"),
        (lambda tls: f"redis://:secret@127.0.0.1:{tls.port}/0", StoreUnavailable, "",
         "rediss://"),
        (lambda tls: f"rediss://:secret@127.0.0.1:{tls.server.files.port}/0"
         f"?ssl_ca_certs={tls.authority}", StoreUnavailable, "", "redis://"),
    ],
    ids=["unknown", "of the system", "another host", "plain to TLS", "TLS to plain"],
)  # fmt: skip
def test_a_failed_handshake_is_explained(
    tls: TlsServer,
    url: Callable[[TlsServer], str],
    kind: type[StoreError],
    message: str,
    remedy: str,
) -> None:
    # A server without TLS doesn't answer what is no command.
    error = failure(url(tls), PATIENCE if kind is StoreDenied else 2.0)

    assert type(error) is kind
    assert message in error.message
    assert remedy in str(error.remedy)
    assert "secret" not in str(error)


def test_a_server_that_wants_a_certificate_gets_it(tls: TlsServer) -> None:
    tls.ask_clients_for_certificates(True)
    client = connect(
        tls.url(ssl_ca_certs=tls.authority, ssl_certfile=tls.certificate, ssl_keyfile=tls.key)
    )

    assert client.ping()
    client.close()


def test_a_client_without_the_required_certificate_gets_a_clear_error(tls: TlsServer) -> None:
    tls.ask_clients_for_certificates(True)

    error = failure(tls.url(ssl_ca_certs=tls.authority))

    assert isinstance(error, StoreUnavailable | StoreDenied)
    assert "ssl_certfile" in str(error.remedy)


@pytest.mark.parametrize("use", [connect, address_of])
@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_a_file_that_is_not_there_is_named_at_once(
    option: str, use: Callable[[str], object], tmp_path: Path
) -> None:
    missing = tmp_path / "missing.pem"

    with pytest.raises(StoreError, match=r"missing\.pem") as caught:
        use(f"rediss://:secret@127.0.0.1:1/0?{option}={missing}")

    assert option in caught.value.message
    assert "secret" not in str(caught.value)


# --- addresses for connections that only pass bytes on -----------------------------------------


async def answer(address: ServerAddress) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls)
    try:
        writer.write(b"PING\r\n")
        return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://:secret@10.0.0.1:7000/2", ServerAddress("10.0.0.1", 7000)),
        ("redis://host", ServerAddress("host", 6379)),
        ("redis://user:secret@[::1]:7000", ServerAddress("::1", 7000)),
        ("unix://:secret@/run/x.sock?db=1", ServerAddress(path="/run/x.sock")),
    ],
)
def test_an_address_has_no_credentials(url: str, address: ServerAddress) -> None:
    assert address_of(url) == address
    assert address_of(url).tls is None
    assert "secret" not in repr(address_of(url))


def test_a_server_with_tls_is_reached_and_verified(tls: TlsServer) -> None:
    answered = asyncio.run(answer(address_of(tls.url(ssl_ca_certs=tls.authority))))

    assert answered.startswith((b"-NOAUTH", b"+PONG"))
    with pytest.raises(OSError, match="certificate verify failed"):
        asyncio.run(answer(address_of(tls.url(ssl_ca_certs=tls.stranger))))
