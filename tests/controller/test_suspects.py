"""Owners of volunteers' machines, and the checkpoint to which the work of a wrong one is undone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr
from support.controllers import fleet_loop
from support.fleet_records import PACKAGE, job_spec
from support.waiting import await_truth

from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.fleet.workplaces import PresentMachines
from vcasgd.controller.jobs.failures import checkpoint_before
from vcasgd.schemas.joining import JoinRequest
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.ledger.placement import Owners, Suspect
from vcasgd.worker_names import worker_name

LISTED = {name: {"versions": [version, 2 * version]} for name, version in (("a", 3), ("b", 7))}


@pytest.mark.parametrize(
    ("shard", "version", "name"),
    [(0, 9, "b"), (0, 7, "b"), (0, 6, "a"), (1, 13, "a"), (1, 14, "b"), (0, 2, "a")],
)
def test_the_newest_checkpoint_before_the_first_wrong_update_is_chosen(
    shard: int, version: int, name: str
) -> None:
    assert checkpoint_before(Suspect(why="", shard=shard, version=version), LISTED) == name


def test_without_checkpoints_there_is_nothing_to_go_back_to() -> None:
    assert checkpoint_before(Suspect(why="", version=3), {}) is None


POOLS = """
pools:
  - {name: ours, provider: join}
  - {name: theirs, provider: join, trust: volunteer}
"""


def test_the_token_of_a_volunteers_machine_is_its_owner(
    ledger: RedisClient, jobs: Jobs, tmp_path: Path
) -> None:
    # Given machines that joined in a pool of volunteers, and in one of one's own
    (file := tmp_path / "pools.yaml").write_text(POOLS)
    settings = Settings(
        home=tmp_path,
        pools=file,
        ledger_url=SecretStr("redis://10.0.0.1:6379/0"),
        tensors_url=SecretStr("redis://10.0.0.2:6379/0"),
        job_secret=SecretStr("a secret of the cluster"),
    )
    request = JoinRequest(version="1", host="h", cpus=1, memory_mb=1)
    machines = JoinedMachines(ledger, 10.0)
    joined = {
        pool: machines.join(token, digit * 64, "s", None, pool, request).name
        for pool, token, digit in (("ours", "lab", "0"), ("theirs", "alice", "1"))
    }
    for name in joined.values():
        machines.report(name, {}, leaving=False)

    # When workers of a job are started there
    spec = job_spec(workers={"max": 2, "pools": list(joined)}, subtasks_per_epoch=100)
    job = jobs.submit(spec, PACKAGE).id
    pools = PoolRegistry(settings, Control(ledger), PresentMachines(machines))
    loop = fleet_loop(settings, ledger, pools)
    await_truth(lambda: (loop.round(), all(map(machines.orders_of, joined.values())))[1])

    # Then only the volunteer's has an owner, and has to commit to its states
    owners = Owners(ledger)
    workers = {pool: worker_name(name, job) for pool, name in joined.items()}
    assert owners.owner(job, workers["ours"]) is None
    assert owners.owner(job, workers["theirs"]) == "alice"
    environments = {pool: machines.orders_of(name)[0].env for pool, name in joined.items()}
    assert environments["theirs"]["VCASGD_VOLUNTEER"] == "true"
    assert "VCASGD_VOLUNTEER" not in environments["ours"]
