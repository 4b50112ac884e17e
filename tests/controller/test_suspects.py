"""Owners of volunteers' machines, and the checkpoint to which the work of a wrong one is undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcasgd.controller.fleet.clearance import ClearancePolicy
from vcasgd.controller.jobs.divergence import checkpoint_before
from vcasgd.fleet.pools import parse_pools
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.ledger.placement import Owners, Suspect

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


def test_the_token_of_a_volunteers_machine_is_its_owner(
    ledger: RedisClient, tmp_path: Path
) -> None:
    # Given machines that joined in a pool of volunteers, and in one of one's own
    settings = Settings(home=tmp_path)
    machines, policy = JoinedMachines(ledger, 10.0), ClearancePolicy(settings, ledger)
    pools = parse_pools(
        {
            "pools": [
                {"name": "ours", "provider": "join"},
                {"name": "theirs", "provider": "join", "trust": "volunteer"},
            ]
        }
    )
    policy.set_pools({pool.name: pool for pool in pools})
    facts = {"host": "h", "cpus": 1, "memory_mb": 1}
    ours = machines.join("lab", "0" * 64, "s", None, "ours", facts)
    theirs = machines.join("alice", "1" * 64, "s", None, "theirs", facts)

    # When workers are placed on them
    workers = {f"job.{ours.name}": "ours", f"job.{theirs.name}_2": "theirs"}
    policy.place({"job": workers})

    # Then only the volunteer's has an owner
    owners = Owners(ledger)
    names = ("ours", "theirs", "gone")
    assert [policy.is_volunteer(each) for each in names] == [False, True, False]
    assert [owners.owner("job", worker) for worker in workers] == [None, "alice"]
