"""The ledger's view of a job with several shards: work is done once all shards have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.world import World, blocks_of

from vcasgd.errors import Fenced
from vcasgd.learning.applied_record import AppliedRecord
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import combined_totals
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.ledger.servers import Accounts

SHARDS = 3
EPOCHS, WIDTH = 3, 3


def accounts_of(world: World) -> list[Accounts]:
    return [Accounts(world.ledger, world.job, shard, SHARDS) for shard in range(SHARDS)]


def pieces(world: World) -> list[str]:
    """Lease every available work item, and return their names."""
    leases, names = world.leases("reader"), []
    while isinstance(lease := leases.acquire(), Lease):
        names.append(lease.piece)
    return names


def test_work_is_done_once_all_shards_have_it(world: World) -> None:
    first, *others = accounts_of(world)

    first.account(1, 3, 1, "{}", [0, 1, 2])
    assert world.jobs.get(world.job).finished_epochs == 0
    assert not world.partition().done
    for each in others:
        each.account(1, 2, 0, "{}", [0, 2])
    assert sorted(world.partition().done) == [0, 2]
    for each in others:
        each.account(1, 3, 1, "{}", [1])

    assert world.jobs.get(world.job).finished_epochs == 1
    assert not world.partition().done
    assert "evaluate:1" in pieces(world)


def test_an_epoch_is_evaluated_once_the_last_shard_has_it(world: World) -> None:
    accounts = accounts_of(world)
    for each in accounts[:2]:
        each.account(1, 3, 1, "{}", [0, 1, 2])
    assert "evaluate:1" not in pieces(world)

    accounts[2].account(1, 3, 1, "{}", [0, 1, 2])

    assert "evaluate:1" in pieces(world)


def test_a_restored_shard_reopens_the_work_it_lacks(world: World) -> None:
    accounts = accounts_of(world)
    for each in accounts:
        each.account(1, 3, 1, "{}", [0, 1, 2])

    accounts[1].reconcile(2, 1, 0, "{}", blocks_of(2))

    partition = world.partition()
    partition.assert_whole()
    assert sorted(partition.done) == [2]
    assert world.jobs.get(world.job).finished_epochs == 0
    assert [each for each in pieces(world) if each in {"train:0", "train:1", "train:2"}] == [
        "train:0",
        "train:1",
    ]


def test_each_shard_has_its_own_fence(world: World) -> None:
    accounts = accounts_of(world)
    accounts[0].account(5, 1, 0, "{}", [0])

    assert accounts[1].account(1, 1, 0, "{}", [0])
    with pytest.raises(Fenced, match="token 5"):
        accounts[0].account(4, 2, 0, "{}", [1])
    assert [each.newest_token() for each in accounts] == [5, 1, 0]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Generate events: kind, shard, and subtasks as bits."""
    kinds = st.sampled_from(["apply", "apply", "apply", "back", "lease", "again"])
    bits = st.integers(0, 2 ** (EPOCHS * WIDTH) - 1)
    return draw(st.lists(st.tuples(kinds, st.integers(0, SHARDS - 1), bits), max_size=15))


class Shards:
    """Shards with their true records, reports to the ledger, and the invariants."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.accounts = accounts_of(world)
        self.done: list[set[int]] = [set() for _ in range(SHARDS)]
        self.tokens = [1] * SHARDS
        self.versions = [0] * SHARDS
        self.last: list[list[int]] = [[] for _ in range(SHARDS)]

    def record(self, shard: int) -> AppliedRecord:
        plan = self.world.plan
        return AppliedRecord(plan, 0, {each: plan.size(each) for each in self.done[shard]})

    def apply(self, kind: str, shard: int, subtasks: set[int]) -> None:
        if kind == "apply":
            self.last[shard] = sorted(subtasks - self.done[shard])
            self.done[shard] |= subtasks
            self.versions[shard] += len(self.last[shard])
            self._account(shard)
        elif kind == "again":
            self._account(shard)
        elif kind == "back":
            self.done[shard] &= subtasks
            self.last[shard] = []
            self.tokens[shard] += 1
            self.versions[shard] = len(self.done[shard])
            self._reconcile(shard)
        else:
            self.world.leases("a").acquire()

    def _account(self, shard: int) -> None:
        record = self.record(shard)
        head = self.tokens[shard], self.versions[shard], record.finished_epochs
        self.accounts[shard].account(*head, "{}", self.last[shard])

    def _reconcile(self, shard: int) -> None:
        record = self.record(shard)
        head = self.tokens[shard], self.versions[shard], record.finished_epochs
        self.accounts[shard].reconcile(*head, "{}", record.done.blocks)

    def check(self) -> None:
        partition, job = self.world.partition(), self.world.jobs.get(self.world.job)
        finished = min(self.record(shard).finished_epochs for shard in range(SHARDS))
        everywhere = set.intersection(*self.done)
        assert job.finished_epochs == finished
        assert set(partition.done) == {each for each in everywhere if each >= finished * WIDTH}
        partition.assert_whole()
        keys, ledger = self.world.ledger_keys, self.world.ledger
        items = [*ledger.zrange(keys.open, 0, -1), *ledger.zrange(keys.leases, 0, -1)]
        evaluations = sorted(each.decode() for each in items if each.startswith(b"evaluate"))
        assert evaluations == [f"evaluate:{epoch + 1}" for epoch in range(finished)]


@pytest.fixture
def make_shards(ledger: RedisClient, tensors: RedisClient, tmp_path: Path) -> Callable[[], Shards]:
    options = {"epochs": EPOCHS, "subtasks_per_epoch": WIDTH, "max_epoch_lead": 2}
    return lambda: Shards(World(ledger, tensors, tmp_path, **options))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=histories())
def test_any_history(
    make_shards: Callable[[], Shards], history: list[tuple[str, int, int]]
) -> None:
    """For all updates, losses, and repeated reports, the work done is that of all shards."""
    state = make_shards()
    for kind, shard, bits in history:
        state.apply(kind, shard, {each for each in range(EPOCHS * WIDTH) if bits >> each & 1})
        state.world.partition().assert_whole()
    state.check()


REPORTS = [
    {"updates": 3, "applied": 30, "restorations": 2, "repeated": 0, "rejected": {"checksum": 1}},
    {"updates": 2, "applied": 20, "restorations": 2, "repeated": -2, "rejected": {}},
    {"updates": 4, "applied": 40, "restorations": 1, "repeated": 1, "rejected": {"checksum": 2}},
]
WORST = {
    "updates": 3,
    "applied": 20,
    "restorations": 1,
    "repeated": -2,
    "rejected": {"checksum": 3},
}


@pytest.mark.parametrize(
    ("reports", "shards", "totals"),
    [
        (REPORTS[:1], 1, REPORTS[0]),
        (REPORTS, 3, WORST),
        # A shard without a report has applied nothing
        (REPORTS[:1], 2, {**REPORTS[0], "applied": 0, "restorations": 0}),
        ([], 2, {}),
    ],
)
def test_totals_of_several_shards_are_the_worst(
    reports: list[dict[str, object]], shards: int, totals: dict[str, object]
) -> None:
    stored = {b"%d:totals" % at: json.dumps(each).encode() for at, each in enumerate(reports)}

    assert combined_totals(stored, shards) == totals
