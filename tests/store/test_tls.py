"""TLS to a real server: verification, and errors.

The Valkey of the wheel is built without TLS, so these tests run on the distribution's Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import TlsServer, running_server

from vcasgd.errors import StoreDenied, StoreError, StoreUnavailable
from vcasgd.store.connection import check_server, connect, without_secret


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    directory = tmp_path_factory.mktemp("tls")
    with running_server("redis", directory / "server") as server:
        yield TlsServer(server, directory)


@pytest.fixture
def tls(running: TlsServer) -> TlsServer:
    running.ask_clients_for_certificates(False)
    return running


def failure(url: str) -> StoreError:
    client = connect(url, answer_seconds=5.0)
    with pytest.raises(StoreError) as caught:
        check_server(client, "ledger")
    client.close()
    return caught.value


def test_a_server_whose_authority_is_named_is_trusted(tls: TlsServer) -> None:
    client = connect(tls.url(ssl_ca_certs=tls.authority))

    check_server(client, "ledger")

    client.close()


def test_an_unknown_authority_is_refused(tls: TlsServer) -> None:
    error = failure(tls.url(ssl_ca_certs=tls.stranger))

    assert type(error) is StoreDenied
    assert "certificate is not accepted" in error.message
    assert "ssl_ca_certs" in str(error.remedy)


def test_without_a_named_authority_the_systems_are_asked(tls: TlsServer) -> None:
    assert type(failure(tls.url())) is StoreDenied


def test_a_host_that_is_not_in_the_certificate_is_refused(tls: TlsServer) -> None:
    error = failure(tls.url("localhost", ssl_ca_certs=tls.authority))

    assert type(error) is StoreDenied
    assert "localhost" in error.message


def test_the_comparison_of_the_host_can_be_turned_off(tls: TlsServer) -> None:
    client = connect(tls.url("localhost", ssl_ca_certs=tls.authority, ssl_check_hostname="false"))

    assert client.ping()
    client.close()


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


def test_plain_text_to_a_port_that_speaks_tls(tls: TlsServer) -> None:
    error = failure(f"redis://:secret@127.0.0.1:{tls.port}/0")

    assert type(error) is StoreUnavailable
    assert "rediss://" in str(error.remedy)
    assert "secret" not in str(error)


def test_tls_to_a_port_that_does_not_speak_it(tls: TlsServer) -> None:
    port = tls.server.files.port

    error = failure(f"rediss://:secret@127.0.0.1:{port}/0?ssl_ca_certs={tls.authority}")

    assert type(error) is StoreUnavailable
    assert "redis://" in str(error.remedy)
    assert "secret" not in str(error)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_a_file_that_is_not_there_is_named_at_once(option: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"

    with pytest.raises(StoreError, match=r"missing\.pem") as caught:
        connect(f"rediss://:secret@127.0.0.1:1/0?{option}={missing}")

    assert option in caught.value.message
    assert "secret" not in str(caught.value)


def test_the_password_of_a_key_is_not_shown() -> None:
    shown = without_secret("rediss://:a@host/0?ssl_keyfile=/k.pem&ssl_password=b")

    assert shown == "rediss://host/0?ssl_keyfile=%2Fk.pem"
