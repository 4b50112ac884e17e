"""Scripts of machines with each command failing: none goes on, or leaves half a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.failing_commands import PART, Script, run_failing, run_script
from support.machine_roots import INFRA

AWS = "CLOUD=aws CLUSTER=mine AWS_DEFAULT_REGION=us-east-1 CONSTRAINTS=s3://b/constraints.txt\n"
GOOGLE = "CLOUD=gcp CLUSTER=mine PROJECT=a-project CONSTRAINTS= \n"
HOSTS = (
    "CONTROL_HOST=10.0.0.10 STORE_HOSTS=10.0.0.20 ADDRESS=10.0.0.10\n"
    "LEDGER_URL=redis://:PASSWORD@10.0.0.10:6379/0 VCASGD_STORAGE_URL=s3://b\n"
)
SAFE = "TLS_SUBJECT=IP:10.0.0.10 REPLICA_HOSTS=10.0.0.30\n"
SERVERS = '{"ledger": "a", "tensors": "b", "jobs": "c"}'
VOLUME = "dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_vol0"
BOOTING = {VOLUME: "\0" * 1_048_576, "etc/fstab": "", "etc/vcasgd/ca.pem": "an authority\n"}
CONTROL = "ROLE=control-plane JOIN=acme LEDGER_DISK=vol-0 API_SUBJECT=DNS:localhost PACKAGE=s3://b/v.whl\n"
#: A report without the reason is better than none.
WITHOUT = frozenset({"systemctl.1", "tee.1"})
SCRIPTS = {
    "secrets of AWS": Script("secrets", f"ROLE=control-plane {AWS}{HOSTS}"),
    "secrets of a store": Script(
        "secrets", f"ROLE=store NODE=0 {GOOGLE}{HOSTS}", files={"stored/mine-servers": SERVERS}
    ),
    "boot of a worker": Script("boot", f"ROLE=worker PACKAGE=vcasgd {GOOGLE}"),
    "certificate": Script("certificate", f"{CONTROL}{AWS}{HOSTS}"),
    "unit-failed on AWS": Script(
        "unit-failed", f"ROLE=worker {AWS}", ("vcasgd-worker.service",), tolerated=WITHOUT
    ),
    "unit-failed on Google": Script(
        "unit-failed", f"ROLE=store {GOOGLE}", ("vcasgd-tensors.service",), tolerated=WITHOUT
    ),
}


#: With more calls than can each fail in seconds.
LONG = {
    "boot of a control plane": Script(
        "boot", f"AUTHORITY=s3://b/ca.pem {CONTROL}{AWS}{HOSTS}{SAFE}", files=BOOTING
    ),
    "secrets with TLS and replicas": Script("secrets", f"ROLE=control-plane {AWS}{HOSTS}{SAFE}"),
    "secrets of managed Redis": Script(
        "secrets", f"ROLE=control-plane MANAGED_REDIS=projects/a/instances/b {GOOGLE}{HOSTS}"
    ),
}


@pytest.mark.parametrize(
    "script",
    [
        *(pytest.param(script, id=name) for name, script in SCRIPTS.items()),
        *(pytest.param(each, id=name, marks=pytest.mark.extended) for name, each in LONG.items()),
    ],
)
@pytest.mark.ci
def test_no_command_of_a_script_fails_unnoticed(script: Script, tmp_path: Path) -> None:
    # Given what a run leaves in which no command fails
    clean = run_script(script, tmp_path / "clean")
    assert clean.status == 0, clean.said
    assert len(clean.calls) > 2
    # When each call fails once
    for call, outcome in run_failing(script, tmp_path, clean).items():
        # Then the script fails, unless it has the same result
        assert outcome.status != 0 or outcome.left == clean.left, f"{call}: {outcome.said}"
        # And it stored nothing else
        for path, text in outcome.left.items():
            assert PART not in text or path not in clean.left, f"{call}: {path}: {text}"


def test_boot_starts_the_worker_last_and_without_what_a_launch_still_has_to_write(
    tmp_path: Path,
) -> None:
    booted = run_script(SCRIPTS["boot of a worker"], tmp_path / "machine")
    assert booted.status == 0, booted.said
    last = booted.left["systemctl"].splitlines()[-1]
    assert last == "enable --now vcasgd-worker.service"
    assert "opt/vcasgd/installed" in booted.left


def test_control_plane_on_another_image_owns_the_ledger_of_the_last_one(tmp_path: Path) -> None:
    # Given a disk with files of a user whose number another image gives to vcasgd
    script = LONG["boot of a control plane"]
    folder = "var/lib/vcasgd/ledger/appendonlydir"
    files = {**script.files, f"{folder}/appendonly.aof.manifest": "a file"}
    # When a new machine boots with it
    booted = run_script(replace(script, files=files), tmp_path / "machine")
    assert booted.status == 0, booted.said
    # Then the ledger may write to them, and the keys beside them stay root's
    changed = booted.left["chown"].splitlines()
    assert [line for line in changed if "-R" in line] == [f"-R vcasgd:vcasgd /{folder}"]


@pytest.mark.parametrize("call", ["curl.2", "curl.4"])
@pytest.mark.ci
def test_a_request_that_fails_once_is_repeated(call: str, tmp_path: Path) -> None:
    # Given a first read of a secret, or its first write, that fails
    script = LONG["secrets of managed Redis"]
    clean = run_script(script, tmp_path / "clean")
    # When the script may wait, then it has the result of one without failures
    patient = run_script(script, tmp_path / "patient", call, patience_seconds=60)
    assert patient.status == 0, patient.said
    assert patient.left == clean.left
    assert call in patient.calls


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("gateway", {"VCASGD_LEDGER_URL", "VCASGD_TENSORS_URL"}),
        ("head", {"VCASGD_LEDGER_URL", "VCASGD_RAY_TOKEN"}),
    ],
)
def test_a_unit_gets_no_secret_that_it_does_not_need(
    name: str, needed: set[str], tmp_path: Path
) -> None:
    # Given all secrets of a control plane
    left = run_script(SCRIPTS["secrets of AWS"], tmp_path / "machine").left
    secrets = {line.partition("=")[0] for line in left["run/vcasgd/secrets.env"].splitlines()}
    assert len(secrets) > 4
    # Then its unit removes the others
    unit = (INFRA / f"systemd/vcasgd-{name}.service").read_text().splitlines()
    removed = next(line for line in unit if line.startswith("UnsetEnvironment="))
    assert secrets - set(removed.partition("=")[2].split()) == needed
