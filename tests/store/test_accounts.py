"""The ledger's view of applied work: reports of parameter servers, and their reconciliation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.world import RESULT, World, blocks_of, lease_of

from vcasgd.errors import Fenced
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.leases import Evaluations, Lease, Leases
from vcasgd.store.ledger.servers import Accounts


def lease_all(leases: Leases) -> list[Lease]:
    taken = []
    while isinstance(answer := leases.acquire(), Lease):
        taken.append(answer)
    return taken


def state_of(world: World) -> dict[str, Any]:
    """Return all the ledger's data about the job's work."""
    keys, ledger = world.ledger_keys, world.ledger
    return {
        "work": world.jobs.work(world.job),
        "open": ledger.zrange(keys.open, 0, -1, withscores=True),
        "leases": ledger.zrange(keys.leases, 0, -1, withscores=True),
        "holders": ledger.hgetall(keys.holders),
        "evaluations": ledger.hgetall(keys.evaluations),
        "reports": ledger.hgetall(keys.shards),
        "blocks": ledger.hgetall(keys.blocks),
        "counters": ledger.hgetall(keys.counters),
    }


class TestAccount:
    def test_a_finished_epoch_is_folded_and_opens_its_evaluation_once(self, world: World) -> None:
        lease_all(world.leases("a"))
        world.accounts.account(1, 2, 0, "{}", [0, 1])

        world.accounts.account(1, 3, 1, "{}", [2])

        partition = world.partition()
        assert not partition.done, "they are in `finished` now"
        assert sorted(partition.leased) == [3, 4, 5]
        assert world.jobs.get(world.job).finished_epochs == 1
        evaluation = lease_of(world.leases("b").acquire())
        assert evaluation.piece == "evaluate:1"

        # a repeated report while the evaluation is leased does not open it again
        world.accounts.account(1, 3, 1, "{}", [2])
        assert not isinstance(world.leases("c").acquire(), Lease)

    @pytest.mark.parametrize(
        ("finished", "done"), [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2, 3, 4, 5])]
    )
    def test_a_repeated_report_changes_nothing(
        self, world: World, finished: int, done: list[int]
    ) -> None:
        lease_all(world.leases("a"))
        world.accounts.account(1, 6, finished, '{"updates": 6}', done)
        before = state_of(world)

        assert world.accounts.account(1, 6, finished, '{"updates": 6}', done)

        assert state_of(world) == before

    def test_an_older_server_is_fenced(self, world: World) -> None:
        world.accounts.account(2, 1, 0, "{}", [0])
        before = state_of(world)

        with pytest.raises(Fenced, match="token 2 has taken over"):
            world.accounts.account(1, 9, 1, "{}", [0, 1, 2])
        with pytest.raises(Fenced, match="token 2 has taken over"):
            world.accounts.reconcile(1, 9, 1, "{}", blocks_of(0, 1, 2))

        assert state_of(world) == before

    def test_a_deleted_job_is_not_recreated(self, world: World) -> None:
        world.ledger.flushdb()

        assert not world.accounts.account(1, 3, 1, "{}", [0, 1, 2])
        world.accounts.reconcile(1, 3, 1, "{}", blocks_of(4))

        assert world.ledger.dbsize() == 0


class TestReconcile:
    def test_results_of_epochs_no_longer_in_the_model_are_removed(self, world: World) -> None:
        lease_all(world.leases("a"))
        world.accounts.account(1, 6, 2, "{}", [0, 1, 2, 3, 4, 5])
        for lease in lease_all(world.leases("a")):
            world.leases("a").report_evaluation(lease, RESULT)

        world.accounts.reconcile(2, 3, 1, "{}", blocks_of())

        assert [each.epoch for each in world.jobs.get(world.job).evaluations] == [1]
        assert not [lease for lease in lease_all(world.leases("b")) if lease.kind == "evaluate"]

    @pytest.mark.parametrize("twice", [False, True])
    def test_a_lost_first_snapshot_is_requested_again(self, world: World, twice: bool) -> None:
        lease_all(world.leases("a"))
        world.expire()

        for _ in range(1 + twice):
            world.accounts.reconcile(2, 0, 0, "{}", blocks_of(), initialise=True)

        taken = [each.piece for each in lease_all(world.leases("b"))]
        assert taken == ["initialise:0", *(f"train:{n}" for n in range(6))]

    def test_a_first_snapshot_lost_before_the_plan_is_set_is_requested_again(
        self, ledger: RedisClient, tensors: RedisClient, tmp_path: Path
    ) -> None:
        world = World(ledger, tensors, tmp_path, running=False, subtasks_per_epoch=None)
        lease = lease_of(world.leases("a").acquire())
        world.leases("a").report_facts(lease, world.facts().to_dict())

        world.accounts.reconcile(1, 0, 0, "{}", blocks_of(), initialise=True)
        assert world.accounts.account(1, 0, 0, "{}", [])

        assert [each.piece for each in lease_all(world.leases("b"))] == ["initialise:0"]


class TestPointsBySamples:
    """Evaluations that are numbered by samples: every 5 samples of 24, and at the end."""

    @pytest.fixture
    def by_samples(self, ledger: RedisClient, tensors: RedisClient, tmp_path: Path) -> World:
        return World(ledger, tensors, tmp_path, evaluate={"every": "5 samples"})

    def evaluations(self, world: World) -> list[int]:
        pending, _ = Evaluations(world.ledger, world.job).read()
        return sorted(pending)

    def test_the_newest_point_of_a_report_is_evaluated_once(self, by_samples: World) -> None:
        world = by_samples
        world.accounts.account(1, 1, 0, "{}", [], samples=4, point=0)
        assert self.evaluations(world) == []

        world.accounts.account(1, 2, 0, "{}", [0], samples=11, point=10)
        assert self.evaluations(world) == [10]

        lease = lease_of(world.leases("a").acquire())
        assert lease.piece == "evaluate:10"
        world.accounts.account(1, 3, 0, "{}", [], samples=12, point=10)
        assert self.evaluations(world) == [10]
        assert world.leases("a").report_evaluation(lease, RESULT)
        world.accounts.account(1, 4, 1, "{}", [1, 2], samples=13, point=10)

        assert Evaluations(world.ledger, world.job).read() == (frozenset(), {10})

    def test_points_after_a_restored_snapshot_are_evaluated_again(self, by_samples: World) -> None:
        world = by_samples
        for version, point in ((1, 5), (2, 10)):
            world.accounts.account(1, version, 0, "{}", [], samples=point + 1, point=point)
            lease = lease_of(world.leases("a").acquire())
            assert world.leases("a").report_evaluation(lease, RESULT)
        world.accounts.account(1, 3, 0, "{}", [], samples=15, point=15)

        world.accounts.reconcile(2, 1, 0, "{}", blocks_of(), samples=8, point=5)

        assert Evaluations(world.ledger, world.job).read() == (frozenset(), {5})
        world.accounts.account(2, 2, 0, "{}", [], samples=10, point=10)
        assert self.evaluations(world) == [10]

    def test_a_point_is_reached_once_all_shards_have_reached_it(self, by_samples: World) -> None:
        world = by_samples
        first, second = (Accounts(world.ledger, world.job, shard, 2) for shard in range(2))

        first.account(1, 1, 0, "{}", [], samples=11, point=10)
        assert self.evaluations(world) == []
        second.account(1, 1, 0, "{}", [], samples=7, point=5)
        assert self.evaluations(world) == [5]
        second.account(1, 2, 0, "{}", [], samples=12, point=10)
        assert self.evaluations(world) == [5, 10]

        second.reconcile(2, 1, 0, "{}", blocks_of(), samples=7, point=5)
        assert self.evaluations(world) == [5]
