"""Scripts that terminate a destroyed cluster's machines, with other command lines of clouds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.machine_roots import INFRA
from support.processes import run_program
from support.waiting import PATIENCE

#: Command lines of clouds whose machines are lines of a file. A deletion waits as long as Google's.
GCLOUD = """#!/bin/bash
echo "$*" >>calls
[ ! -e broken ] || exit 1
case "$3" in
  list)
    cat machines
    # A launch that was in progress
    [ ! -e late ] || { cat late >>machines; rm late; } ;;
  delete)
    if [ -e denied ]; then
      echo "ERROR: (gcloud.compute.instances.delete) Could not fetch resource:" >&2
      echo " - Required 'compute.instances.delete' permission for 'projects/p/…'" >&2
      exit 1
    fi
    exec 9>lock
    flock 9
    all="$*"
    for name in ${all##*--quiet }; do
      [ -e "kept-$name" ] || sed -i "/\\t$name\\$/d" machines
    done ;;
esac
"""
AWS = """#!/bin/bash
echo "$*" >>calls
[ ! -e broken ] || exit 1
case "$2" in
  describe-instances)
    cut -f 2 machines
    [ ! -e late ] || { cat late >>machines; rm late; } ;;
  terminate-instances)
    if [ -e denied ]; then
      echo "An error occurred (UnauthorizedOperation) when calling TerminateInstances" >&2
      exit 254
    fi
    all="$*"
    ids="${all##*--instance-ids }"
    # One that is protected
    [ ! -e protected ] || [[ " ${ids%% --*} " != *" $(<protected) "* ]] || exit 1
    for id in ${ids%% --*}; do [ -e "kept-$id" ] || sed -i "/\\t$id\\$/d" machines; done ;;
esac
"""
PROGRAMS = {"gcp": ("gcloud", GCLOUD), "aws": ("aws", AWS)}


class Cloud:
    def __init__(self, folder: Path, cloud: str, machines: int) -> None:
        self.folder, self.cloud = folder, cloud
        name, text = PROGRAMS[cloud]
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
        rows = [f"zone-{number % 3}\tm-{number}\n" for number in range(machines)]
        (folder / "machines").write_text("".join(rows))

    def terminate(self, deadline_seconds: int = int(PATIENCE)) -> subprocess.CompletedProcess[str]:
        return run_program(
            [INFRA / "fleet" / f"terminate-{self.cloud}", "mine", "a-place"],
            cwd=self.folder,
            env={
                "PATH": f"{self.folder}:{os.environ['PATH']}",
                "VCASGD_PAUSE_SECONDS": "0",
                "VCASGD_DEADLINE_SECONDS": str(deadline_seconds),
            },
        )

    def left(self) -> str:
        return (self.folder / "machines").read_text()

    def calls(self, word: str) -> int:
        return sum(word in line for line in (self.folder / "calls").read_text().splitlines())


@pytest.fixture(params=["gcp", "aws"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Cloud:
    return Cloud(tmp_path, request.param, 40)


def test_many_machines_end_in_few_calls(cloud: Cloud) -> None:
    done = cloud.terminate()
    assert done.returncode == 0, done.stderr
    assert cloud.left() == ""
    assert cloud.calls(" delete " if cloud.cloud == "gcp" else "terminate-instances") <= 3


def test_a_launch_in_progress_is_found(cloud: Cloud) -> None:
    (cloud.folder / "late").write_text("zone-1\tm-late\n")
    done = cloud.terminate()
    assert done.returncode == 0, done.stderr
    assert cloud.left() == ""


def test_a_machine_that_stays_is_an_error(cloud: Cloud) -> None:
    (cloud.folder / "kept-m-7").touch()
    done = cloud.terminate(deadline_seconds=1)
    assert done.returncode == 1
    assert "m-7" in done.stderr


def test_a_protected_machine_of_aws_keeps_no_other_one_alive(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, "aws", 3)
    (tmp_path / "protected").write_text("m-1")
    done = cloud.terminate(deadline_seconds=1)
    assert done.returncode == 1
    assert "still running after ten minutes: m-1" in done.stderr
    assert cloud.left() == "zone-1\tm-1\n"


def test_a_missing_permission_is_named_at_once(cloud: Cloud) -> None:
    (cloud.folder / "denied").touch()
    done = cloud.terminate(deadline_seconds=2)
    assert done.returncode == 1
    allow = {"gcp": "compute.instances.delete", "aws": "ec2:TerminateInstances"}[cloud.cloud]
    assert f"allow {allow}" in done.stderr
    assert "ten minutes" not in done.stderr


def test_a_listing_that_fails_is_an_error(cloud: Cloud) -> None:
    (cloud.folder / "broken").touch()
    assert cloud.terminate().returncode != 0
