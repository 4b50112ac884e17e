"""Ray's head as a process of its own, as the machines of a cloud start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcasgd.cluster import head
from vcasgd.errors import SpecError
from vcasgd.settings import Settings


def _command(ledger_url: str, address: str = "10.80.0.10:10000") -> tuple[str, dict[str, str]]:
    found = head.command(
        Settings(cluster="mine"),
        address=address,
        ledger_url=ledger_url,
        temp_dir=Path("/run/vcasgd-head/head"),
        token="a token",
    )
    assert found is not None
    return " ".join(found.argv), found.env


def test_the_head_listens_where_the_machines_look_for_it() -> None:
    argv, env = _command("redis://:a%2Fpassword@10.80.0.10:6379/0")
    assert "--node-ip-address 10.80.0.10" in argv
    assert "--port 10000" in argv
    assert env["RAY_REDIS_ADDRESS"] == "10.80.0.10:6379"
    assert env["RAY_REDIS_PASSWORD"] == "a/password"
    assert env["RAY_external_storage_namespace"] == "mine"
    assert "password" not in argv


def test_a_managed_ledger_is_spoken_to_with_tls() -> None:
    _, env = _command("rediss://:p@ledger:6378/0?replicas=1&ssl_ca_certs=/etc/vcasgd/redis-ca.pem")
    assert env["RAY_REDIS_ADDRESS"] == "rediss://ledger:6378"
    assert env["RAY_REDIS_CA_CERT"] == "/etc/vcasgd/redis-ca.pem"


@pytest.mark.parametrize("address", ["10.80.0.10", ":10000", "10.80.0.10:", "host:port"])
def test_an_address_without_host_or_port_is_named(address: str) -> None:
    with pytest.raises(SpecError, match="VCASGD_RAY_ADDRESS"):
        _command("redis://127.0.0.1:6379/0", address)


def test_what_is_missing_is_said_and_the_process_ends() -> None:
    foreign = {name: value for name, value in os.environ.items() if name[:7] != "VCASGD_"}
    done = subprocess.run(
        [sys.executable, "-m", "vcasgd.cluster.head"], env=foreign, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "VCASGD_RAY_ADDRESS is not set" in done.stderr
