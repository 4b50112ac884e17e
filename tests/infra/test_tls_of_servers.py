"""TLS of a cluster's servers: the machines' own scripts and configuration, and a real Redis.

The Valkey of the wheel is built without TLS, so this runs on the distribution's Redis.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.fake_google import FakeGoogle, GoogleMachine
from support.machine_roots import INFRA
from support.ports import free_port
from support.processes import run_program
from support.servers import require_binary
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import StoreDenied, StoreError, StoreUnavailable
from vcasgd.store.connection import check_server, connect

LEDGER = "rediss://:PASSWORD@127.0.0.1:6379/0?ssl_ca_certs=/etc/vcasgd/ca.pem"
TLS = f"TLS_SUBJECT='IP:127.0.0.1,IP:10.0.0.20' LEDGER_URL='{LEDGER}'\n"
AUTHORITY = "AUTHORITY='gs://a-bucket/control/ca.pem'\n"


def make_secrets(machine: GoogleMachine) -> dict[str, str]:
    done = machine.run("secrets")
    assert done.returncode == 0, done.stderr
    return machine.secrets()


@contextmanager
def server_of(machine: GoogleMachine, role: str, port: int) -> Iterator[None]:
    """Run a server with the machine's configuration, on another port."""
    root = machine.root
    text = (INFRA / "redis" / f"{role}.conf").read_text()
    for path in ("/run/vcasgd-tensors", "/var/lib/vcasgd/ledger", "/var/lib/vcasgd"):
        text = text.replace(path, str(root))
    text = text.replace("/run/vcasgd/", f"{root}/run/vcasgd/")
    configuration = root / f"{role}.conf"
    configuration.write_text(f"{text}\ntls-port {port}\n")
    with (root / "log").open("wb") as log:
        process = subprocess.Popen([require_binary("redis"), configuration], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def reachable(url: str, root: Path, port: int) -> str:
    """Return a URL of the machine as one of this computer."""
    host = urlsplit(url).hostname
    url = url.replace(f"@{host}:", "@127.0.0.1:").replace(":6379/", f":{port}/")
    return url.replace(":6380/", f":{port}/").replace("=/etc/vcasgd", f"={root}/etc/vcasgd")


def answers(url: str) -> bool:
    try:
        with connect(url) as client:
            check_server(client, "server")
    except StoreUnavailable:
        return False
    return True


@pytest.mark.parametrize("role", ["ledger", "tensors"])
def test_server_speaks_only_tls_and_workers_trust_it(
    google: FakeGoogle, tmp_path: Path, role: str
) -> None:
    # Given a control plane and a store node of a cluster with TLS
    control = GoogleMachine(tmp_path / "control", google, "control-plane", more=TLS + AUTHORITY)
    store = GoogleMachine(tmp_path / "store", google, "store", more=TLS + AUTHORITY)
    secrets = make_secrets(control)
    assert secrets["VCASGD_RAY_TLS"] == "1"
    assert make_secrets(store)["VCASGD_LEDGER_URL"] == secrets["VCASGD_LEDGER_URL"]
    machine, url = (
        (control, secrets["VCASGD_LEDGER_URL"])
        if role == "ledger"
        else (store, secrets["VCASGD_TENSORS_URL"].split()[0])
    )
    # And a worker, which gets only the authority
    published = control.shell('store_object "$ROOT/etc/vcasgd/ca.pem" "$AUTHORITY"')
    assert published.returncode == 0, published.stderr
    worker = GoogleMachine(tmp_path / "worker", google, "worker", more=AUTHORITY)
    fetched = worker.shell('fetch_object "$AUTHORITY" "$ROOT/etc/vcasgd/ca.pem"')
    assert fetched.returncode == 0, fetched.stderr
    port = free_port()
    with server_of(machine, role, port):
        # Then the worker reaches the server by the URL that all machines have
        at = reachable(url, worker.root, port)
        await_truth(lambda: answers(at))
        # And neither without TLS, nor with another authority, nor under another name
        plain = at.replace("rediss://", "redis://").partition("?")[0]
        for wrong in (plain, at.partition("?")[0], at.replace("@127.0.0.1:", "@localhost:")):
            with pytest.raises(StoreError) as refused, connect(wrong) as client:
                client.ping()
            assert isinstance(refused.value, StoreDenied | StoreUnavailable)
    # And the key is private, and that of the authority is nowhere
    key = machine.root / "run/vcasgd/tls/server.key"
    assert key.stat().st_mode & 0o007 == 0
    assert set(json.loads(google.secrets["mine-servers"])["tls"]) == {
        "ca",
        "certificate",
        "key",
        "subject",
    }
    assert list(machine.root.rglob("ca.key")) == []


def test_existing_cluster_gets_a_certificate_and_keeps_its_passwords(
    google: FakeGoogle, tmp_path: Path
) -> None:
    make_secrets(GoogleMachine(tmp_path / "before", google, "control-plane"))
    before = json.loads(google.secrets["mine-servers"])
    assert "tls" not in before

    make_secrets(GoogleMachine(tmp_path / "after", google, "control-plane", more=TLS))
    after = json.loads(google.secrets["mine-servers"])
    assert {name: value for name, value in after.items() if name != "tls"} == before

    make_secrets(GoogleMachine(tmp_path / "again", google, "control-plane", more=TLS))
    assert json.loads(google.secrets["mine-servers"]) == after


def test_another_network_gets_a_certificate_with_its_addresses(
    google: FakeGoogle, tmp_path: Path
) -> None:
    # Given a cluster with TLS
    make_secrets(GoogleMachine(tmp_path / "before", google, "control-plane", more=TLS))
    before = json.loads(google.secrets["mine-servers"])
    # When its machines are in another network
    there = TLS.replace("10.0.0.20", "10.1.0.20")
    store = GoogleMachine(tmp_path / "store", google, "store", more=there)
    # Then a store node waits for the control plane
    assert store.run("secrets").returncode != 0
    make_secrets(GoogleMachine(tmp_path / "after", google, "control-plane", more=there))
    make_secrets(store)
    # And both have a certificate for the new addresses, and the passwords that they had
    after = json.loads(google.secrets["mine-servers"])
    assert {**after, "tls": None} == {**before, "tls": None}
    done = run_program(
        ["openssl", "x509", "-noout", "-ext", "subjectAltName"], input=after["tls"]["certificate"]
    )
    assert "IP Address:10.1.0.20" in done.stdout
