"""Ray's head as its own process, as on a machine in a cloud."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.processes import run_program

from vcasgd.cluster.head import head_command
from vcasgd.errors import SpecError
from vcasgd.settings import Settings


def _command(ledger_url: str, address: str = "10.80.0.10:10000") -> tuple[str, dict[str, str]]:
    command = head_command(
        Settings(cluster="mine"),
        address=address,
        ledger_url=ledger_url,
        temp_dir=Path("/run/vcasgd-head/head"),
        token="a token",
    )
    assert command is not None
    return " ".join(command.argv), command.env


def test_head_listens_on_the_configured_address() -> None:
    argv, env = _command("redis://:a%2Fpassword@10.80.0.10:6379/0")
    assert "--node-ip-address 10.80.0.10" in argv
    assert "--head 10000" in argv
    assert env["RAY_REDIS_ADDRESS"] == "10.80.0.10:6379"
    assert env["RAY_REDIS_PASSWORD"] == "a/password"
    assert env["RAY_external_storage_namespace"] == "mine"
    assert "password" not in argv


def test_managed_ledger_is_reached_over_tls() -> None:
    _, env = _command("rediss://:p@ledger:6378/0?replicas=1&ssl_ca_certs=/etc/vcasgd/redis-ca.pem")
    assert env["RAY_REDIS_ADDRESS"] == "rediss://ledger:6378"
    assert env["RAY_REDIS_CA_CERT"] == "/etc/vcasgd/redis-ca.pem"


@pytest.mark.parametrize("address", ["10.80.0.10", ":10000", "10.80.0.10:", "host:port"])
def test_address_without_host_or_port_is_rejected(address: str) -> None:
    with pytest.raises(SpecError, match="VCASGD_RAY_ADDRESS"):
        _command("redis://127.0.0.1:6379/0", address)


def test_missing_setting_is_reported_and_the_process_exits() -> None:
    foreign = {name: value for name, value in os.environ.items() if name[:7] != "VCASGD_"}
    done = run_program([sys.executable, "-m", "vcasgd.cluster.head"], env=foreign)
    assert done.returncode == 1
    assert "VCASGD_RAY_ADDRESS is not set" in done.stderr
