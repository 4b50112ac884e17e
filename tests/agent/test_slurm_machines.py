"""Machines that are jobs of a real Slurm cluster, with real preemptions."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.counted_job import CountedJob, training_machines
from support.joinable_stack import launching_stack
from support.slurm import SlurmCluster, SlurmJob, slurm_cluster
from support.waiting import await_truth

from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.stack import StackState

POOL = "hpc"
MACHINES = 2
#: Runs the real command. Then it waits while there is a file ``hold``.
SLOW_SBATCH = """#!/bin/sh
{sbatch} "$@" > {folder}/answer || exit 1
[ ! -e {folder}/hold ] || touch {folder}/submitted
while [ -e {folder}/hold ]; do sleep 0.1; done
cat {folder}/answer
"""


@dataclass
class SlurmStack:
    """A stack whose only pool is a Slurm cluster."""

    settings: Settings
    client: Client
    cluster: SlurmCluster
    folder: Path

    def trains_on(self, count: int) -> bool:
        """Return True if so many machines run and have a worker."""
        return training_machines(self.client) == count

    def log_of(self, job: SlurmJob) -> str:
        return (self.folder / f"{job.id}.log").read_text()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmStack]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(MACHINES) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.configuration))
        patch.setenv("PATH", f"{_slow_commands(folder)}:{os.environ['PATH']}")
        with launching_stack(folder, _pool(folder)) as (settings, client, token):
            token_file = folder / "token"
            token_file.write_text(token)
            token_file.chmod(0o600)
            yield SlurmStack(settings, client, cluster, folder)
        assert cluster.machines() == [], "`down` left a job behind"
        assert cluster.machines("PENDING") == []


def _slow_commands(folder: Path) -> Path:
    commands = folder / "bin"
    commands.mkdir()
    sbatch = commands / "sbatch"
    sbatch.write_text(SLOW_SBATCH.format(sbatch=shutil.which("sbatch"), folder=folder))
    sbatch.chmod(0o755)
    return commands


def _pool(folder: Path) -> dict[str, Any]:
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:$PATH",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TMPDIR": temporary,
        "VCASGD_HOME": folder,
    }
    return {
        "name": POOL,
        "provider": "slurm",
        "zones": ["spot"],
        "max_machines": MACHINES,
        "template": {
            "token_file": str(folder / "token"),
            "setup": "\n".join(f'export {name}="{value}"' for name, value in environment.items()),
            "output": str(folder / "%A_%a.log"),
        },
    }


def _preempt_one(stack: SlurmStack) -> None:
    """Preempt a machine, and wait until another one has replaced it."""
    await_truth(lambda: stack.trains_on(MACHINES) and len(stack.cluster.machines()) == MACHINES)
    victim = min(stack.cluster.machines(), key=lambda job: int(job.id.partition("_")[0]))
    urgent = stack.cluster.preempt(victim)
    said = stack.log_of(victim)
    assert "leaves: interrupted" in said, "it got a notice"
    assert "left in good order" in said
    stack.cluster.cancel(urgent)


@pytest.mark.slow
@pytest.mark.ci
def test_preempted_machine_is_replaced_and_no_sample_is_lost(
    stack: SlurmStack, tmp_path: Path
) -> None:
    # Given a job on two machines
    job = CountedJob(stack.client, tmp_path)
    job.await_updates(3)

    # When one of them is preempted
    _preempt_one(stack)

    # Then another one replaces it, and every sample was applied exactly once
    await_truth(lambda: stack.trains_on(MACHINES))
    public = stack.cluster.run("scontrol", "show", "job") + stack.cluster.run(
        "squeue", "-o", "%all"
    )
    assert POOL in public
    assert (stack.folder / "token").read_text() not in public
    job.finish()

    # And machines without a job end
    await_truth(lambda: not stack.cluster.jobs())


@pytest.mark.slow
@pytest.mark.extended
def test_submission_that_no_controller_recorded_is_found_again(
    stack: SlurmStack, tmp_path: Path
) -> None:
    # Given a controller that is killed after Slurm has accepted its jobs, before it knows
    hold = stack.folder / "hold"
    hold.touch()
    job = CountedJob(stack.client, tmp_path)
    await_truth((stack.folder / "submitted").exists)
    before = StackState.read(stack.settings.home).parts["controller"]
    os.kill(before.pid, signal.SIGKILL)
    hold.unlink()
    orphans = {each.id for each in stack.cluster.jobs()}
    assert orphans

    # When the next one takes over
    def restarted() -> bool:
        part = StackState.read(stack.settings.home).parts["controller"]
        return part.restarts > before.restarts and part.ready

    await_truth(restarted)
    job.await_updates(3)

    # Then it uses those jobs, and submits no others in their place
    jobs = [each for each in stack.cluster.jobs() if each.name.startswith("vcasgd/")]
    assert orphans <= {each.id for each in jobs}
    assert len(jobs) <= MACHINES
    arrays = {(each.name, each.id.partition("_")[0]) for each in jobs}
    assert max(Counter(name for name, _ in arrays).values()) == 1, "one array a launch"
    job.finish()
    await_truth(lambda: not stack.cluster.jobs())
