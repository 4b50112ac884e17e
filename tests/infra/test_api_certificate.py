"""Certificate of the API's server, by the machine's own script and the real OpenSSL."""

from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import pytest
from support.machine_roots import write_root
from support.processes import run_program

SETTINGS = "CLOUD=aws ROLE=control-plane CLUSTER=mine VCASGD_STORAGE_URL=s3://a-bucket\n"
LOCAL, PUBLIC = "IP:127.0.0.1,DNS:localhost", "IP:203.0.113.7,DNS:localhost"


class Machine:
    """Root of a control plane, whose bucket is a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        write_root(root, SETTINGS)
        self._program("programs/systemctl", f'echo "$*" >>{root}/systemctl')
        self._program("opt/vcasgd/tools/bin/aws", f'cp "$4" {root}/published')
        self.folder = root / "var/lib/vcasgd/ledger/tls"
        self.certificate = self.folder / "api.pem"

    def _program(self, name: str, line: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def run(self, names: str) -> bytes:
        """Run the script, and return the certificate."""
        done = run_program(
            [self.root / "usr/local/lib/vcasgd/certificate"],
            env={
                "PATH": f"{self.root}/programs:{os.environ['PATH']}",
                "VCASGD_ROOT": str(self.root),
                "API_SUBJECT": names,
            },
        )
        assert done.returncode == 0, done.stderr
        return self.certificate.read_bytes()

    @property
    def reloads(self) -> int:
        return (self.root / "systemctl").read_text().count("nginx.service")

    @property
    def published(self) -> str:
        return (self.root / "published").read_text()


def _accepts(trusted: str, machine: Machine, name: str) -> bool:
    """Return whether a client that trusts an authority accepts the machine under a name."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(machine.certificate, machine.folder / "api.key")
    client = ssl.create_default_context(cadata=trusted)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ends = [ssl.MemoryBIO() for _ in range(2)]
    there = server.wrap_bio(ends[0], ends[1], server_side=True)
    here = client.wrap_bio(ends[1], ends[0], server_hostname=name)
    for _ in range(4):
        for end in (here, there):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_valid_certificate_is_kept(machine: Machine) -> None:
    first = machine.run(LOCAL)
    assert machine.run(LOCAL) == first
    assert _accepts(machine.published, machine, "127.0.0.1")
    assert (machine.folder / "api.key").stat().st_mode & 0o077 == 0


def test_other_names_get_another_certificate_that_earlier_clients_accept(machine: Machine) -> None:
    # Given a client of a cluster behind a tunnel
    first = machine.run(LOCAL)
    client = machine.published
    # When the API opens to the outside
    second = machine.run(PUBLIC)
    # Then its certificate has the address, and this client accepts it
    assert second != first
    assert machine.published == client
    assert _accepts(client, machine, "203.0.113.7")
    assert not _accepts(client, machine, "127.0.0.1")
    # And the server reads it again
    assert machine.reloads == 2


@pytest.mark.parametrize(("days", "replaced"), [(60, True), (200, False)])
def test_a_certificate_is_replaced_before_it_ends(
    machine: Machine, days: int, replaced: bool
) -> None:
    # Given a certificate that ends in some days
    machine.run(LOCAL)
    subprocess.run(
        f"openssl x509 -req -days {days} -in api.csr -out api.pem -extfile extensions "
        "-CA authority.pem -CAkey authority.key".split(),
        cwd=machine.folder,
        check=True,
        capture_output=True,
    )
    soon = machine.certificate.read_bytes()
    # When the timer runs the script again
    assert (machine.run(LOCAL) != soon) == replaced
    assert _accepts(machine.published, machine, "localhost")
