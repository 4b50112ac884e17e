"""Checks of the files for machines that need no machine."""

from __future__ import annotations

import grp
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from compose_pydantic.models import ComposeSpecification
from support.ports import free_port
from support.processes import run_program
from support.servers import KINDS, require_binary
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import StoreDenied, StoreUnavailable
from vcasgd.gateway.relay import pin_of
from vcasgd.limits import MAX_CLIENTS_PERCENT
from vcasgd.store.connection import RedisClient, check_server, connect
from vcasgd.store.embedded import LIMITS

INFRA = Path(__file__).parents[2] / "infra"
SCRIPTS = sorted(
    path
    for folder in ("bin", "docker", "fleet", "local", "packer")
    for path in (INFRA / folder).iterdir()
    if "sh" in path.read_text().partition("\n")[0]
)
UNITS = sorted((INFRA / "systemd").iterdir())


def test_scripts_pass_shellcheck() -> None:
    assert len(SCRIPTS) > 8
    done = run_program(
        [
            Path(sys.prefix) / "bin/shellcheck",
            "--external-sources",
            "--source-path=.",
            # Where bash ignores failures in spite of set -e
            "--enable=check-extra-masked-returns,check-set-e-suppressed",
            *SCRIPTS,
        ],
        cwd=INFRA.parent,
    )
    assert done.returncode == 0, done.stdout


def test_systemd_accepts_the_units() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = run_program(["systemd-analyze", "verify", "--man=no", *UNITS])
    # Their programs exist only on the machines.
    said = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert [line for line in said if "vcasgd-" in line] == []


def test_no_unit_writes_where_a_ledgers_disk_is_missing() -> None:
    folder = "/var/lib/vcasgd/ledger"
    writers = [
        name
        for name in ("ledger", "certificate", "acme")
        if f"RequiresMountsFor={folder}\n" in (INFRA / f"systemd/vcasgd-{name}.service").read_text()
    ]
    programs = {path.stem for path in SCRIPTS if folder in path.read_text()}
    assert set(writers) == {"ledger"} | programs - {"boot"}


#: Prints the units that needrestart would restart by itself after an update of the system.
NEEDRESTART = """
our %nrconf = (override_rc => {});
open(my $file, "<", shift) or die;
eval do { local $/; <$file> };
die $@ if $@;
for my $unit (@ARGV) {
  my @kept = grep { $unit =~ $_ && !$nrconf{override_rc}{$_} } keys %{$nrconf{override_rc}};
  print "$unit\n" unless @kept;
}
"""


def test_updates_of_the_system_restart_no_unit() -> None:
    if shutil.which("perl") is None:
        pytest.skip("perl is not installed")
    configuration = INFRA / "needrestart/vcasgd.conf"
    units = [*(path.name for path in UNITS), "nginx.service"]
    done = run_program(["perl", "-e", NEEDRESTART, configuration, *units])
    assert done.stdout.split() == ["nginx.service"], done.stderr


def test_file_system_of_the_ledger_grows_with_its_disk(tmp_path: Path) -> None:
    # Given a disk that has grown, and the step of the boot script that mounts it
    programs = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    if shutil.which("resize2fs", path=programs["PATH"]) is None:
        pytest.skip("e2fsprogs is not installed")
    disk = tmp_path / "disk"
    run_program(["mkfs.ext4", "-q", disk, "16M"], env=programs)
    os.truncate(disk, 32 << 20)
    boot = (INFRA / "bin/boot").read_text()
    step = boot[boot.index("mount_ledger()") :].partition("\n}\n")[0] + "\n}\n"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/fstab").touch()
    device = f"disk_device() {{ echo {disk}; }}"
    stubs = f"patiently() {{ :; }}; mount() {{ :; }}; chown() {{ :; }}; {device}"
    # When a machine boots with it
    done = run_program(
        ["bash", "-euc", f"{stubs}\n{step}mount_ledger"],
        env={**programs, "ROOT": str(tmp_path), "LEDGER_DISK": "vol-0", "EMPTY_BYTES": "1048576"},
    )
    assert done.returncode == 0, done.stderr
    # Then the ledger has all of it, and after each growth at the next start of the system
    said = run_program(["dumpe2fs", "-h", disk], env=programs).stdout.splitlines()
    facts = dict(line.split(":", 1) for line in said if ":" in line)
    assert int(facts["Block count"]) * int(facts["Block size"]) == 32 << 20
    assert "x-systemd.growfs" in (tmp_path / "etc/fstab").read_text()


def test_compose_file_is_valid_and_contains_no_password() -> None:
    text = (INFRA / "compose.yaml").read_text()
    value = {key: each for key, each in yaml.safe_load(text).items() if not key.startswith("x-")}
    services = ComposeSpecification(**value).services
    assert set(services) == {"ledger", "tensors", "platform", "api"}
    # And only this machine can reach the API
    assert value["services"]["api"]["ports"] == ["127.0.0.1:8700:8700"]
    assert [
        each for name, each in value["services"].items() if name != "api" and "ports" in each
    ] == []
    # Logs don't fill the disk
    assert all(each["logging"]["options"]["max-size"] for each in value["services"].values())
    # Passwords are required, and have no defaults
    assert text.count("${VCASGD_REDIS_PASSWORD:?") == 4
    assert ":-" not in text.split("VCASGD_TOKEN:")[1].splitlines()[0]


@pytest.mark.both_servers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("role", "durable"), [("ledger", True), ("tensors", False)])
def test_redis_accepts_its_configuration(
    kind: str, role: str, durable: bool, tmp_path: Path
) -> None:
    # Given the configuration of the machines, with other paths and another port
    binary = require_binary(kind)
    port = free_port()
    text = (INFRA / "redis" / f"{role}.conf").read_text()
    for path in ("/run/vcasgd-tensors", "/run/vcasgd", "/var/lib/vcasgd/ledger", "/var/lib/vcasgd"):
        text = text.replace(path, str(tmp_path))
    lines = [f"port {port}" if line.startswith("port ") else line for line in text.splitlines()]
    configuration = tmp_path / "redis.conf"
    configuration.write_text("\n".join(lines) + "\n")
    (tmp_path / f"{role}.conf").write_text("requirepass a-password\nmaxmemory 64mb\n")
    # When a server is started with it
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([binary, configuration], stdout=log, stderr=log)
    try:
        client = connect(f"redis://:a-password@127.0.0.1:{port}/0")
        await_truth(lambda: _answers(client, role))
        # Then the server is supported, and as durable as its role requires
        wanted = client.config_get("append*", "save")
        limits = client.config_get(
            "databases", "proto-max-bulk-len", "client-*-buffer-limit", "maxmemory-clients"
        )
        client.close()
        stranger = connect(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(StoreDenied):
            check_server(stranger, role)
        stranger.close()
    finally:
        process.terminate()
        process.wait(PATIENCE)
    assert wanted["appendonly"] == ("yes" if durable else "no")
    assert wanted["save"] == ""
    own = dict(line.split(" ", 1) for line in LIMITS)
    unread = limits.pop("client-output-buffer-limit")
    assert own.pop("client-output-buffer-limit") in unread
    assert limits == {**own, "maxmemory-clients": f"{MAX_CLIENTS_PERCENT}%"}
    if durable:
        assert wanted["appendfsync"] == "always"


def _answers(client: RedisClient, role: str) -> bool:
    try:
        check_server(client, role)
    except StoreUnavailable:
        return False
    return True


def test_certificate_of_the_gateway_is_made_once_and_its_pin_published(tmp_path: Path) -> None:
    # Given the step of the boot script, and an installation
    boot = (INFRA / "bin/boot").read_text()
    step = boot[boot.index("make_join_certificate()") :].partition("\n}\n")[0] + "\n}\n"
    (tmp_path / "etc/vcasgd").mkdir(parents=True)
    group = grp.getgrgid(os.getgid()).gr_name
    variables = {"ROOT": str(tmp_path), "GROUP": group, "VENV": sys.prefix}

    # When a machine boots, and another one with the same disk
    pins = []
    for _ in range(2):
        subprocess.run(
            ["bash", "-euc", f"{step}make_join_certificate"],
            env={**os.environ, **variables},
            check=True,
        )
        pins.append((tmp_path / "etc/vcasgd/gateway.env").read_text())

    # Then both publish the same pin, that of the certificate, whose key is private
    folder = tmp_path / "var/lib/vcasgd/ledger/gateway"
    expected = pin_of((folder / "certificate.pem").read_text())
    assert pins == [f"VCASGD_JOIN_PIN={expected}\n"] * 2
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o640
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
