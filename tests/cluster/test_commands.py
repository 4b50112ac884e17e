"""Commands of Ray's processes, and its head as a process of its own, as on a machine in a cloud."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ports import free_port
from support.processes import run_program

from vcasgd.cluster.commands import Command, node_command
from vcasgd.cluster.driver import Cluster
from vcasgd.cluster.head import head_command
from vcasgd.errors import ClusterError, SpecError
from vcasgd.settings import Settings

TOKEN = "a token"
LEDGER = "redis://:a%2Fpassword@10.80.0.10:6379/0"


def head(
    ledger_url: str = LEDGER, address: str = "10.80.0.10:10000", folder: str = "/run/vcasgd-head"
) -> Command:
    settings = Settings(cluster="mine", heartbeat=1.0)
    options = {"ledger_url": ledger_url, "temp_dir": Path(folder), "token": TOKEN}
    command = head_command(settings, address=address, **options)
    assert command is not None
    return command


def node() -> Command:
    return node_command(
        address="10.0.0.1:1", machine_id="i", cpus=1.5, temp_dir=Path("/tmp/v"), heartbeat=1.0,
        token=TOKEN,
    )  # fmt: skip


def test_head_listens_on_the_configured_address() -> None:
    command = head()
    argv = " ".join(command.argv)
    assert "--node-ip-address 10.80.0.10" in argv
    assert "--head 10000" in argv
    assert command.env["RAY_REDIS_ADDRESS"] == "10.80.0.10:6379"
    assert command.env["RAY_REDIS_PASSWORD"] == "a/password"
    assert command.env["RAY_external_storage_namespace"] == "mine"


@pytest.mark.parametrize("make", [head, node])
def test_secrets_are_in_the_environment_and_in_no_repr(make: Callable[[], Command]) -> None:
    command = make()
    assert TOKEN in command.env.values()
    for secret in ("password", TOKEN):
        assert secret not in repr(command)
        assert secret not in " ".join(command.argv)
    assert command.env["RAY_health_check_period_ms"] == "1000", "it follows the heartbeat"


def test_node_without_gpus_hides_those_of_the_host() -> None:
    assert node().env["CUDA_VISIBLE_DEVICES"] == ""


def test_managed_ledger_is_reached_over_tls() -> None:
    url = "rediss://:p@ledger:6378/0?replicas=1&ssl_ca_certs=/etc/vcasgd/redis-ca.pem"
    env = head(url).env
    assert env["RAY_REDIS_ADDRESS"] == "rediss://ledger:6378"
    assert env["RAY_REDIS_CA_CERT"] == "/etc/vcasgd/redis-ca.pem"


def test_folder_too_long_for_sockets_is_rejected() -> None:
    with pytest.raises(ClusterError, match="at most 37 bytes"):
        head(folder="/tmp/" + "x" * 40)


@pytest.mark.parametrize("address", ["10.80.0.10", ":10000", "10.80.0.10:", "host:port"])
def test_address_without_host_or_port_is_rejected(address: str) -> None:
    with pytest.raises(SpecError, match="VCASGD_RAY_ADDRESS"):
        head(address=address)


def test_connecting_to_a_closed_port_fails_in_time() -> None:
    with pytest.raises(ClusterError, match="no process listens"):
        Cluster.connect(f"127.0.0.1:{free_port()}", "test", timeout=0.5)


def test_missing_setting_is_reported_and_the_process_exits() -> None:
    foreign = {name: value for name, value in os.environ.items() if name[:7] != "VCASGD_"}
    done = run_program([sys.executable, "-m", "vcasgd.cluster.head"], env=foreign)
    assert done.returncode == 1
    assert "VCASGD_RAY_ADDRESS is not set" in done.stderr
