"""Ray's traffic over TLS, with certificates that follow from the token."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from support.ray_rig import HOST, TOKEN, Driver, running_rig, start_worker
from support.waiting import PATIENCE, await_truth

from vcasgd.cluster.commands import use_tls
from vcasgd.encryption import Authority
from vcasgd.errors import SpecError
from vcasgd.local_files import write_private

HEAD = "127.0.0.1"


class Wiretap:
    """Passes connections on to the head, and records what machines send."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((HEAD, 0))
        self.address = f"{HEAD}:{self._listener.getsockname()[1]}"
        self.recorded = bytearray()
        threading.Thread(target=self._accept).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection((HEAD, self._target))
                except OSError:
                    client.close()
                    continue
                for source, target in ((client, server), (server, client)):
                    passing = threading.Thread(target=self._pass_on, args=(source, target))
                    passing.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(65_536):
                if source.getpeername()[1] != self._target:
                    self.recorded += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def greet(port: int, token: str, folder: Path) -> bytes:
    """Shake hands with the head with a certificate of this token; return the first answer."""
    authority = Authority(token, "vcasgd ray")
    certificate, key = authority.issue("test", [HOST])
    write_private(folder / "pem", certificate + key)
    context = ssl.create_default_context(cadata=authority.certificate().decode())
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(folder / "pem")
    with (
        socket.create_connection((HEAD, port), timeout=PATIENCE) as connection,
        context.wrap_socket(connection, server_hostname=HEAD) as stream,
    ):
        # In TLS 1.3, a server refuses a client's certificate after the handshake.
        stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        return stream.recv(1)


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [True, pytest.param(False, marks=pytest.mark.extended)])
@pytest.mark.ci
def test_token_is_on_the_wire_only_without_tls(encrypted: bool, tmp_path: Path) -> None:
    with running_rig(tls=encrypted) as rig, closing(Wiretap(rig.port)) as wire:
        driver = Driver(rig)
        try:
            rig.start_node("tapped", wire.address)
            start_worker(rig, driver, "tapped")
            await_truth(lambda: len(wire.recorded) > 1000)
        finally:
            driver.end()
        assert (TOKEN.encode() in wire.recorded) is not encrypted
        assert (b"tapped" in wire.recorded) is not encrypted

        if encrypted:
            assert greet(rig.port, TOKEN, tmp_path)
            with pytest.raises(ssl.SSLCertVerificationError):
                greet(rig.port, TOKEN + "x", tmp_path)


def test_those_with_the_same_token_trust_each_other() -> None:
    here, there = Authority(TOKEN, "a"), Authority(TOKEN, "a")
    issued = x509.load_pem_x509_certificate(here.issue("machine", [HOST, "head.example"])[0])
    issued.verify_directly_issued_by(x509.load_pem_x509_certificate(there.certificate()))
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each.value) for each in names] == [HOST, "head.example"]


@pytest.mark.parametrize(("secret", "name"), [(TOKEN + "x", "a"), (TOKEN, "b")])
def test_another_token_or_name_is_another_authority(secret: str, name: str) -> None:
    issued = x509.load_pem_x509_certificate(Authority(TOKEN, "a").issue("machine", [HOST])[0])
    other = x509.load_pem_x509_certificate(Authority(secret, name).certificate())
    with pytest.raises((InvalidSignature, ValueError)):
        issued.verify_directly_issued_by(other)


def test_short_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"VCASGD_RAY_TOKEN.*at least 32"):
        use_tls("a-short-token", HEAD, tmp_path)
    assert not list(tmp_path.iterdir())
