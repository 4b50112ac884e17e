"""Addresses for connections that only pass bytes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import TlsServer, running_server

from vcasgd.errors import StoreError
from vcasgd.store.sentinel import ServerAddress, address_of


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    directory = tmp_path_factory.mktemp("tls")
    with running_server("redis", directory / "server") as server:
        yield TlsServer(server, directory)


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


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"ssl_ca_certs=.*none\.pem"):
        address_of(f"rediss://host:1/0?ssl_ca_certs={tmp_path}/none.pem")
