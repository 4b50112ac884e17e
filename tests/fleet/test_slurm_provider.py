"""The provider of a real Slurm cluster. Its machines are scripts that wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.slurm import SlurmCluster, slurm_cluster
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import CloudUnavailable, InvalidRequest, NoCapacity
from vcasgd.fleet.pools import SlurmPoolSpec
from vcasgd.fleet.providers.base import MACHINE_ID, Boot
from vcasgd.fleet.providers.joining import JoinedFleet
from vcasgd.fleet.providers.slurm import SlurmProvider
from vcasgd.schemas.fleet import MachineState

SECRET = "a-token-that-nobody-sees"
#: Writes what it gets, and waits for the notice.
MACHINE = """
trap 'echo notice >> "$0.$1"; exit 0' TERM
echo "$VCASGD_TOKEN $VCASGD_LEDGER_URL" > "$0.$1"
while true; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(2) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.configuration))
        patch.setenv("VCASGD_LEDGER_URL", "redis://:password@host")
        patch.setattr("vcasgd.fleet.providers.slurm.COMMAND_SECONDS", PATIENCE)
        yield cluster


@pytest.fixture
def provider(cluster: SlurmCluster, tmp_path: Path) -> Iterator[SlurmProvider]:
    (tmp_path / "token").write_text(SECRET)
    provider = SlurmProvider("c", [_pool(tmp_path)], JoinedFleet())
    yield provider
    provider.terminate(*(one.id for one in provider.machines()))
    await_truth(lambda: not provider.machines())
    assert cluster.machines() == []


def _pool(folder: Path) -> SlurmPoolSpec:
    template = {"token_file": str(folder / "token")}
    return SlurmPoolSpec.model_validate(
        {"name": "hpc", "provider": "slurm", "zones": ["spot", "closed"], "template": template}
    )


def _boot(folder: Path) -> Boot:
    return Boot(("bash", "-c", MACHINE, str(folder / "out"), MACHINE_ID))


def test_machines_run_get_a_notice_and_end(
    cluster: SlurmCluster, provider: SlurmProvider, tmp_path: Path
) -> None:
    first, second = provider.launch("hpc", 2, _boot(tmp_path), "token-1", zones=["spot"])
    outputs = {machine: tmp_path / f"out.{machine}" for machine in (first, second)}
    await_truth(lambda: all(path.exists() and path.read_text() for path in outputs.values()))

    # Nothing of the environment but the token reaches a job, and nobody sees that.
    assert outputs[first].read_text() == f"{SECRET} \n"
    public = cluster.run("scontrol", "show", "job") + cluster.run("ps", "-eo", "args")
    assert "hpc" in public
    assert SECRET not in public

    provider.evict(first)
    await_truth(lambda: "notice" in outputs[first].read_text())
    provider.kill(second)
    await_truth(lambda: not provider.machines())
    assert "notice" not in outputs[second].read_text()


def test_preempted_machine_has_a_notice(
    cluster: SlurmCluster, provider: SlurmProvider, tmp_path: Path
) -> None:
    (machine,) = provider.launch("hpc", 1, _boot(tmp_path), "token-2", zones=["spot"])
    output = tmp_path / f"out.{machine}"
    await_truth(output.exists)
    (job,) = cluster.machines()
    urgent = cluster.preempt(job)
    assert "notice" in output.read_text()
    assert provider.machines() == []
    cluster.cancel(urgent)


def test_launch_that_was_cancelled_before_it_began_is_not_repeated(
    cluster: SlurmCluster, provider: SlurmProvider, tmp_path: Path
) -> None:
    others = cluster.occupy()
    first, _ = provider.launch("hpc", 2, _boot(tmp_path), "token-7", zones=["spot"])
    assert {one.state for one in provider.machines()} == {MachineState.WAITING}
    cluster.run("scancel", "--partition=spot")

    assert provider.launch("hpc", 2, _boot(tmp_path), "token-7", zones=["spot"]) == [first]
    assert provider.machines() == []
    cluster.run("scancel", others)


def test_partition_without_room_is_refused_or_says_why(
    provider: SlurmProvider, tmp_path: Path
) -> None:
    try:
        (machine,) = provider.launch("hpc", 1, _boot(tmp_path), "token-3", zones=["closed"])
    except NoCapacity:
        return
    await_truth(lambda: provider.machines() and provider.boot_error(machine))
    assert "Partition" in str(provider.boot_error(machine))


def test_requests_that_slurm_refuses_are_errors_of_the_fleet(
    provider: SlurmProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = _pool(tmp_path).model_copy(update={"zones": ("nowhere",)})
    with pytest.raises(InvalidRequest, match="invalid partition"):
        SlurmProvider("c", [wrong], JoinedFleet()).launch("hpc", 1, _boot(tmp_path), "token-4")
    large = _pool(tmp_path).model_copy(update={"cpus": 64})
    few = SlurmProvider("c", [large], JoinedFleet())
    (machine,) = few.launch("hpc", 1, _boot(tmp_path), "token-5", zones=["spot"])
    await_truth(lambda: few.machines() and few.boot_error(machine))
    assert "Config" in str(few.boot_error(machine))
    with pytest.raises(NoCapacity, match="its machines are spot"):
        provider.launch("hpc", 1, _boot(tmp_path), "token-6", spot=False)

    # A controller that can't be reached is no empty list.
    text = Path(os.environ["SLURM_CONF"]).read_text()
    away = tmp_path / "slurm.conf"
    away.write_text(text.replace("SlurmctldPort=", "MessageTimeout=2\nSlurmctldPort=1"))
    monkeypatch.setenv("SLURM_CONF", str(away))
    with pytest.raises(CloudUnavailable):
        provider.machines()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidRequest, match="no command squeue"):
        provider.machines()
