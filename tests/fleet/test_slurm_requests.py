"""Slurm's output and messages, and submissions, without a Slurm cluster."""

from __future__ import annotations

from typing import Any

import pytest

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    SpecError,
    Throttled,
)
from vcasgd.fleet.pools import SlurmPoolSpec, parse_pools
from vcasgd.fleet.providers.base import MACHINE_ID
from vcasgd.fleet.providers.joining import Listed, pool_of_ordered
from vcasgd.fleet.providers.slurm import error_of, job_name, job_of, parse_queue, script, submission
from vcasgd.schemas.fleet import MachineState

TOKEN = "0f0e0d0c-0b0a-4908-8706-050403020100"
POOL: dict[str, Any] = {
    "name": "hpc-17",
    "provider": "slurm",
    "zones": ["spot"],
    "template": {"token_file": "/home/ada/my token"},
}


def line(
    state: str = "RUNNING",
    *,
    reason: str = "None",
    start: str = "1795436766",
    preempt: str = "N/A",
    name: str = f"vcasgd/c/hpc-17/{TOKEN}",
) -> str:
    """Return a line of squeue 22.05."""
    fields = ("5", "1", state, reason, "n1", "1795436760", start, preempt, "spot")
    return "".join(f"{field:<12}|" for field in fields) + f"{name:<200}|"


def only(text: str) -> Listed:
    (job,) = parse_queue(text, "c")
    return job


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (line("PENDING"), MachineState.WAITING),
        (line("CONFIGURING"), MachineState.BOOTING),
        (line("RUNNING"), MachineState.RUNNING),
        (line("RUNNING", preempt="1795436769"), MachineState.LEAVING),
        (line("COMPLETING"), MachineState.LEAVING),
        (line("SUSPENDED"), MachineState.LEAVING),
        (line("COMPLETED"), MachineState.GONE),
        (line("PREEMPTED", preempt="1795436769"), MachineState.GONE),
        (line("NODE_FAIL"), MachineState.GONE),
        (line("RESIZING"), MachineState.RUNNING),
        (line("A_LATER_STATE"), MachineState.RUNNING),
    ],
)
def test_states_of_jobs_are_those_of_machines(text: str, state: MachineState) -> None:
    assert only(text).machine.state is state


def test_jobs_have_their_times_and_owners() -> None:
    listed = only(line(preempt="1795436769"))
    job = listed.machine
    assert (job.id, job_of(job.id)) == ("join-hpc-17-5-1", "5_1")
    assert (job.pool, listed.launch) == ("hpc-17", job_name("c", "hpc-17", TOKEN))
    assert job.launched_at == 1795436766
    assert (job.notice_at, job.host, job.zone) == (1795436769, "n1", "spot")
    assert only(line("PENDING")).machine.launched_at == 1795436760, "the start is an estimate"


@pytest.mark.parametrize("name", ["wrap", "vcasgd/other/hpc/t", "a|b|c", "vcasgd/c/hpc", ""])
def test_other_jobs_are_left_alone(name: str) -> None:
    assert parse_queue(line(name=name), "c") == []


def test_array_that_never_began_has_one_machine_that_is_gone() -> None:
    cancelled = line("CANCELLED").replace("1           |", "N/A         |", 1)
    (job,) = parse_queue(cancelled, "c")
    assert job.machine.id == "join-hpc-17-5-0"
    assert job.machine.state is MachineState.GONE
    with pytest.raises(CloudUnavailable):
        parse_queue(cancelled.replace("CANCELLED", "RUNNING"), "c")


@pytest.mark.parametrize(
    "text", ["slurm_load_jobs: a warning", line().replace("1795436760", "yesterday"), line()[:60]]
)
def test_unreadable_output_is_an_error_and_no_empty_list(text: str) -> None:
    with pytest.raises(CloudUnavailable, match="can't be read"):
        parse_queue(f"{line()}\n{text}\n", "c")


@pytest.mark.parametrize(
    ("reason", "stuck"),
    [
        ("Priority", False),
        ("Resources", False),
        ("None", False),
        ("PartitionDown", True),
        ("QOSMaxJobsPerUserLimit", True),
        ("AssocGrpCpuLimit", True),
        ("BadConstraints", True),
        ("JobHeldAdmin", True),
    ],
)
def test_jobs_that_will_not_start_say_why(reason: str, stuck: bool) -> None:
    why = only(line("PENDING", reason=reason)).boot_error
    assert (why is not None) is stuck
    assert not stuck or reason in str(why)
    assert only(line("RUNNING", reason=reason)).boot_error is None


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("i-0abc", None),
        ("join-alice-1a2b3c4d", None),
        ("join-hpc-5", None),
        ("join-hpc-5-1 ", None),
        ("join-hpc-17-5-0", "hpc-17"),
        ("join-hpc-17-5", "hpc"),
        ("join-gpu-big-0123456789ab-7", "gpu-big"),
    ],
)
def test_names_of_ordered_machines_say_their_pool(name: str, pool: str | None) -> None:
    assert pool_of_ordered(name) == pool


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("QOSMaxSubmitJobPerUserLimit\nBatch job submission failed: Job violates QOS policy",
         QuotaExceeded),
        ("Batch job submission failed: Required partition not available (inactive or drain)",
         NoCapacity),
        ("Batch job submission failed: Requested node configuration is not available", NoCapacity),
        ("invalid partition specified: nowhere", InvalidRequest),
        ("Batch job submission failed: Invalid account or account/partition combination specified",
         CloudDenied),
        ("Slurm temporarily unable to accept job, sleeping and retrying", Throttled),
        ("Unable to contact slurm controller (connect failure)", CloudUnavailable),
        ("something new", CloudUnavailable),
    ],
)  # fmt: skip
def test_messages_become_errors(message: str, kind: type[FleetError]) -> None:
    error = error_of("sbatch", f"sbatch: error: {message}", pool="hpc")
    assert type(error) is kind
    assert error.message.startswith("hpc: ")
    assert error.remedy or kind is Throttled


def spec(**template: Any) -> SlurmPoolSpec:
    (pool,) = parse_pools(
        {"pools": [{**POOL, "cpus": 4, "gpus": 1, "template": {**POOL["template"], **template}}]}
    )
    assert isinstance(pool, SlurmPoolSpec)
    return pool


def test_submission_asks_for_what_the_pool_says() -> None:
    pool = spec(account="ml", qos="low", memory="8G", time_limit="90s", constraint="a100&ib")
    arguments = submission(pool, job_name("c", "hpc-17", TOKEN), ["spot"], 3)
    assert {
        f"--job-name=vcasgd/c/hpc-17/{TOKEN}",
        "--array=0-2",
        "--partition=spot",
        "--cpus-per-task=4",
        "--gpus-per-node=1",
        "--account=ml",
        "--qos=low",
        "--mem=8G",
        "--time=2",
        "--constraint=a100&ib",
        "--no-requeue",
        "--signal=TERM@60",
    } <= set(arguments)
    plain = submission(spec(), "a-name", ["spot"], 1)
    assert not [each for each in plain if each.startswith(("--account", "--mem", "--time"))]


def test_script_reads_the_token_on_the_node_and_names_the_machine() -> None:
    text = script(spec(setup="module load python"), ["vcasgd", "join", "a b", MACHINE_ID])
    lines = text.splitlines()
    assert lines[:3] == ["#!/bin/bash", "module load python", "trap : TERM"]
    assert "'/home/ada/my token' vcasgd join 'a b' " in text
    assert '"join-hpc-17-${SLURM_ARRAY_JOB_ID}-${SLURM_ARRAY_TASK_ID}"' in text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"zones": []}, "zones"),
        ({"zones": ["a b"]}, "zones"),
        ({"cpus": 1.5}, "cpus"),
        ({"name": "a" * 21}, "pools.0"),
        ({"template": {}}, "template.token_file"),
        ({"template": {"token_file": "relative"}}, "template.token_file"),
        ({"template": {"token_file": "/t", "memory": "lots"}}, "template.memory"),
        ({"template": {"token_file": "/t", "account": "--x y"}}, "template.account"),
        ({"template": {"token_file": "/t", "partition": "p"}}, "template.partition"),
    ],
)
def test_pool_that_slurm_would_refuse_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_pools({"pools": [{**POOL, **change}]})
    assert field in str(refused.value.field)
