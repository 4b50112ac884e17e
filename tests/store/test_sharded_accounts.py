"""The ledger's view of a job with one or several shards: work is done once all shards have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.world import World

from vcasgd.errors import Fenced
from vcasgd.learning.applied_record import AppliedRecord
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import combined_totals
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.ledger.servers import Accounts

SHARDS = 3
EPOCHS, WIDTH = 3, 3


def accounts_of(world: World, shards: int = SHARDS) -> list[Accounts]:
    return [Accounts(world.ledger, world.job, shard, shards) for shard in range(shards)]


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
    kinds = st.sampled_from(["apply", "apply", "apply", "back", "lease", "release", "again"])
    bits = st.integers(0, 2 ** (EPOCHS * WIDTH) - 1)
    return draw(st.lists(st.tuples(kinds, st.integers(0, SHARDS - 1), bits), max_size=15))


class Shards:
    """Shards with their true records, reports to the ledger, and the invariants."""

    def __init__(self, world: World, shards: int) -> None:
        self.world = world
        self.leases = world.leases("a")
        self.held: list[Lease] = []
        self.accounts = accounts_of(world, shards)
        self.done: list[set[int]] = [set() for _ in range(shards)]
        self.tokens = [1] * shards
        self.versions = [0] * shards
        self.last: list[list[int]] = [[] for _ in range(shards)]

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
        elif kind == "lease":
            answer = self.leases.acquire()
            self.held += [answer] if isinstance(answer, Lease) else []
        elif self.held:
            self.leases.release(self.held.pop(0))

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
        finished = min(self.record(shard).finished_epochs for shard in range(len(self.done)))
        everywhere = set.intersection(*self.done)
        assert job.finished_epochs == finished
        assert set(partition.done) == {each for each in everywhere if each >= finished * WIDTH}
        partition.assert_whole()
        keys, ledger = self.world.ledger_keys, self.world.ledger
        items = [*ledger.zrange(keys.open, 0, -1), *ledger.zrange(keys.leases, 0, -1)]
        evaluations = sorted(each.decode() for each in items if each.startswith(b"evaluate"))
        assert evaluations == [f"evaluate:{epoch + 1}" for epoch in range(finished)]


@pytest.fixture
def make_shards(
    ledger: RedisClient, tensors: RedisClient, tmp_path: Path
) -> Callable[[int], Shards]:
    options = {"epochs": EPOCHS, "subtasks_per_epoch": WIDTH, "max_epoch_lead": 2}
    return lambda shards: Shards(World(ledger, tensors, tmp_path, **options), shards)


@pytest.mark.parametrize("shards", [1, SHARDS])
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(history=histories())
# An epoch that the shards finish one after the other, and that one of them lost again.
@example(history=[*(("apply", shard, 0b101) for shard in range(SHARDS)), ("apply", 0, 0b010),
                  ("lease", 0, 0), ("apply", 1, 0b010), ("apply", 2, 0b010)])  # fmt: skip
@example(history=[*(("apply", shard, 0b111) for shard in range(SHARDS)), ("back", 1, 0b100)])
def test_any_history(
    make_shards: Callable[[int], Shards], shards: int, history: list[tuple[str, int, int]]
) -> None:
    """For all updates, losses, and repeated reports, the work done is that of all shards."""
    state = make_shards(shards)
    for kind, shard, bits in history:
        subtasks = {each for each in range(EPOCHS * WIDTH) if bits >> each & 1}
        state.apply(kind, shard % shards, subtasks)
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
