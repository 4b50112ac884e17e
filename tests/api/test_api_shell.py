"""A command beside a worker: where it runs, where it is refused, and what remains of it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from support.api_harness import Api
from typer.testing import CliRunner

from vcasgd.api.routes.shell import shell_command
from vcasgd.cli.commands import app
from vcasgd.client import Client
from vcasgd.errors import Conflict, Forbidden, NotFound
from vcasgd.spec.access import Scope

POOLS = {
    "local": {"provider": "local"},
    "east": {"provider": "aws", "region": "us-east-1"},
    "west": {"provider": "gcp", "template": {"project": "lab"}},
    "laptops": {"provider": "join", "trust": "volunteer"},
    "desks": {"provider": "join"},
    "queue": {"provider": "slurm"},
}


def beside(api: Api, pool: str, machine: str = "m-1") -> tuple[str, str]:
    job = api.submit(env={"MODE": "debug"})
    row = {"id": machine, "pool": pool, "state": "running", "job": job, "zone": "zone-a"}
    api.control.publish({machine: row}, POOLS)
    api.control.set_pool_specs(POOLS)
    worker = f"{job}.{machine}"
    beat = {"at": 5.0, "doing": "training", "machine": "m-2", "visible_gpus": "2,3"}
    api.leases(job, worker).renew(beat, [])
    return job, worker


@pytest.mark.parametrize(
    ("pool", "command", "expected"),
    [
        ("local", ["nvidia-smi"], ""),
        ("east", [], "aws ssm start-session --target m-1 --region us-east-1"),
        ("east", ["ls", "a b"], '{"command": ["ls \'a b\'"]}'),
        ("west", [], "gcloud compute ssh m-1 --tunnel-through-iap --project lab --zone zone-a"),
        ("west", ["ls", "a b"], "--command ls 'a b'"),
    ],
)
def test_each_pool_has_its_own_way(pool: str, command: list[str], expected: str) -> None:
    row = {"pool": pool, "zone": "zone-a"}
    assert " ".join(shell_command("m-1", row, POOLS[pool], command)).endswith(expected)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (POOLS["laptops"], "belongs to someone else"),
        (POOLS["desks"], "belongs to someone else"),
        (POOLS["queue"], "sandbox"),
        ({"provider": "slurm", "trust": "volunteer"}, "sandbox"),
        ({"provider": "kubernetes"}, "sandbox"),
        ({}, "no longer known"),
    ],
)
def test_machines_of_others_and_sandboxes_have_none(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(Conflict, match=why) as refused:
        shell_command("m-1", {"pool": "p"}, spec, ["id"])
    assert refused.value.remedy


def test_a_command_runs_with_the_code_of_the_job_and_is_recorded(api: Api, client: Client) -> None:
    job, worker = beside(api, "local")
    with pytest.raises(Conflict, match="no worker on a machine"):
        client.job(api.submit()).shell()
    code = api.home / "cache" / "local" / ("0" * 64)
    options = ("--url", api.url, "--token", api.token)
    elsewhere = CliRunner().invoke(app, ["exec", job, *options, "--", "id", "--secret"])
    assert f"its code is not here: {code}" in elsewhere.stderr.replace("\n", "")
    code.mkdir(parents=True)
    program = (
        "import os; print(os.getcwd(), os.environ['MODE'], 'VCASGD_TOKEN' in os.environ, "
        "os.environ['CUDA_VISIBLE_DEVICES'])"
    )

    done = subprocess.run(
        [sys.executable, "-m", "vcasgd.cli", "exec", job, "m-1", "--", "python", "-c", program],
        env={**os.environ, **api.env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.stdout == f"{code} debug False 2,3\n", done.stderr
    events = [each for each in client.job(job).events() if each.kind == "exec"]
    assert [each.text for each in events] == [
        f"bootstrap runs id beside {worker}",
        f"bootstrap runs python beside {worker}",
    ]
    assert "--secret" not in str(events)


def test_a_command_on_a_clouds_machine_sees_the_gpus_of_its_worker(
    api: Api, client: Client
) -> None:
    job, worker = beside(api, "west")
    assert client.job(job).shell(worker, ["nvidia-smi", "-L"]).argv[-1] == (
        "env CUDA_VISIBLE_DEVICES=2,3 nvidia-smi -L"
    )
    assert "env" not in client.job(job).shell(worker).argv

    # What a worker says about itself is no command
    beat = {"at": 6.0, "doing": "training", "visible_gpus": "0 sh -c id"}
    api.leases(job, worker).renew(beat, [])
    assert client.job(job).shell(worker, ["ls"]).argv[-1] == "ls"


def test_only_administrators_get_one(api: Api, client: Client) -> None:
    job, worker = beside(api, "local")
    text = client.create_token("sam", Scope.SUBMIT).token
    with Client(api.url, text) as other, pytest.raises(Forbidden, match="scope admin"):
        other.job(job).shell(worker)
    with pytest.raises(NotFound, match="has no worker"):
        client.job(job).shell(f"{job}.m-9")
    assert "exec" not in {each.kind for each in client.job(job).events()}


def test_a_worker_on_a_volunteers_machine_is_refused(api: Api, client: Client) -> None:
    job, worker = beside(api, "laptops")
    with pytest.raises(Conflict, match="belongs to someone else"):
        client.job(job).shell(worker)
    assert "exec" not in {each.kind for each in client.job(job).events()}
