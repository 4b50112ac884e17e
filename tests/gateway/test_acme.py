"""The gateway's certificate by ACME, with the machine's own script and a real authority.

Let's Encrypt's test authority (pebble) validates the name over HTTP. systemd is not here.
"""

from __future__ import annotations

import grp
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.children import Process
from support.gateways import RunningGateway, running_gateway
from support.machine_roots import write_root
from support.missing import skip_here
from support.ports import free_port, listens
from support.waiting import await_truth

from vcasgd.encryption import Authority
from vcasgd.gateway.relay import pin_of

NAME = "join.example.org"
#: Passes a reload on as systemd does.
SYSTEMCTL = """#!/bin/sh
[ ! -e {log}.failing ] || exit 1
[ "$*" = "reload vcasgd-gateway.service" ] && kill -HUP {pid} && echo >> {log}
"""
#: More days than a certificate is valid, so that it is renewed at once.
ALWAYS = "100000"


@dataclass
class Machine:
    """A control plane with a gateway, and what its script needs."""

    root: Path
    gateway: RunningGateway
    reloads: Path
    environment: dict[str, str]

    def acme(self, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "usr/local/lib/vcasgd/acme"],
            env={**self.environment, **changes},
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def served(self) -> str:
        """The pin of the certificate that a new connection gets."""
        return self.gateway.served()

    @property
    def issued(self) -> str:
        return pin_of((self.root / "var/lib/vcasgd/ledger/acme/certificate.pem").read_text())


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    needed = ("lego", "pebble", "pebble-challtestsrv")
    if missing := [each for each in needed if shutil.which(each) is None]:
        skip_here(f"Debian's packages lego and pebble are needed: no {', '.join(missing)}")
    home, root = tmp_path / "home", tmp_path / "root"
    home.mkdir()
    with ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(home))
        port = free_port()
        settings = {
            "ROLE": "control-plane",
            "CLOUD": "aws",
            "ACME_NAME": NAME,
            "ACME_EMAIL": "ada@example.org",
            "ACME_SERVER": f"https://127.0.0.1:{_start_authority(stack, tmp_path, port)}/dir",
            "ACME_PORT": str(port),
        }
        write_root(root, "".join(f"{name}='{value}'\n" for name, value in settings.items()))
        # The gateway has a certificate of its own until there is another one.
        (root / "var/lib/vcasgd/ledger").mkdir(parents=True)
        (root / "var/lib/vcasgd/ledger/acme").symlink_to(gateway.certificate.parent)
        programs, reloads = tmp_path / "programs", tmp_path / "reloads"
        programs.mkdir()
        systemctl = programs / "systemctl"
        systemctl.write_text(SYSTEMCTL.format(pid=gateway.process.pid, log=reloads))
        systemctl.chmod(0o755)
        environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "VCASGD_ROOT": str(root),
            "VCASGD_GROUP": grp.getgrgid(os.getgid()).gr_name,
            "LEGO_CA_CERTIFICATES": str(tmp_path / "ca.pem"),
        }
        yield Machine(root, gateway, reloads, environment)


def _start_authority(stack: ExitStack, folder: Path, http_port: int) -> int:
    """Start an authority that looks for the name on this machine; return its port."""
    port, names, ca = free_port(), free_port(), Authority("secret", "authorities")
    certificate, key = ca.issue("pebble", ["127.0.0.1"])
    (folder / "ca.pem").write_bytes(ca.certificate())
    (folder / "pebble.pem").write_bytes(certificate)
    (folder / "pebble.key").write_bytes(key)
    configuration = {
        "listenAddress": f"127.0.0.1:{port}",
        "managementListenAddress": f"127.0.0.1:{free_port()}",
        "certificate": str(folder / "pebble.pem"),
        "privateKey": str(folder / "pebble.key"),
        "httpPort": http_port,
        "tlsPort": free_port(),
    }
    (folder / "pebble.json").write_text(json.dumps({"pebble": configuration}))
    off = [part for name in ("http01", "https01", "tlsalpn01") for part in (f"-{name}", "")]
    commands = {
        "names": ["pebble-challtestsrv", "-dns01", f"127.0.0.1:{names}", "-defaultIPv6", "",
                  "-management", f"127.0.0.1:{free_port()}", *off],
        "pebble": ["pebble", "-config", str(folder / "pebble.json"),
                   "-dnsserver", f"127.0.0.1:{names}"],
    }  # fmt: skip
    for name, argv in commands.items():
        environment = {"PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "0"}
        process = Process(argv, folder / f"{name}.log", environment)
        stack.callback(process.end)
    await_truth(lambda: listens(port) and listens(names))
    return port


def test_certificate_is_issued_kept_and_renewed_without_closing_a_connection(
    machine: Machine,
) -> None:
    gateway, own = machine.gateway, machine.gateway.pin
    assert machine.served == own
    gateway.publish_pool()
    with gateway.connection("ledger", gateway.token("ann")) as (server, _):
        done = machine.acme()
        assert done.returncode == 0, done.stderr

        # Then new connections get the authority's certificate, with the key in private
        await_truth(lambda: machine.served == machine.issued != own)
        first = machine.issued
        folder = gateway.certificate.parent
        assert (folder / "key.pem").stat().st_mode & 0o777 == 0o640

        # and later runs change nothing while it is valid for long
        assert machine.acme().returncode == 0
        assert machine.issued == first

        # and repeat a reload that failed
        failing = Path(f"{machine.reloads}.failing")
        failing.touch()
        assert machine.acme().returncode != 0
        failing.unlink()
        reloads = len(machine.reloads.read_text())
        assert machine.acme().returncode == 0
        assert len(machine.reloads.read_text()) == reloads + 1

        # and renew it at its end
        done = machine.acme(ACME_DAYS=ALWAYS)
        assert done.returncode == 0, done.stderr
        await_truth(lambda: machine.served == machine.issued != first)

        # and all that time, the connection was open
        server.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert server.recv(100).startswith(b"-NOAUTH")


@pytest.mark.ci
def test_a_name_that_leads_elsewhere_leaves_the_certificate_as_it_was(machine: Machine) -> None:
    with (machine.root / "etc/vcasgd/machine.env").open("a") as settings:
        settings.write(f"ACME_PORT='{free_port()}'\n")

    done = machine.acme()

    assert done.returncode != 0
    assert machine.served == machine.gateway.pin
    assert not machine.reloads.exists()
