"""A failover may bring back an older state of the tensors server, or of the ledger.

A promoted replica has a prefix of its primary's writes. These tests save the state of a real
server, and restore it later.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.honest_workers import HonestWorker, run_to_end
from support.shard_links import flush, link_of, settle, submit
from support.world import MakeWorld, World

from vcasgd.errors import Fenced, StoreUnavailable
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.leases import LostWorkers
from vcasgd.worker.shard_link import ShardLink

Past = dict[bytes, bytes]


def remember(server: RedisClient) -> Past:
    """Return the complete state of a server."""
    keys = server.keys()
    return {key: server.dump(key) for key in keys}


def go_back(server: RedisClient, past: Past) -> None:
    """Restore a saved state."""
    server.flushdb()
    for key, value in past.items():
        server.restore(key, 0, value)


@pytest.fixture
def client(world: World) -> Iterator[ShardLink]:
    client = link_of(world)
    yield client
    client.close()


def push(world: World, client: ShardLink, subtask: int, start: int, stop: int) -> None:
    submit(world, client, subtask, start, stop)
    flush(client)


class TestTheParameterServerIsAhead:
    def test_it_publishes_what_it_has_over_the_older_state(self, world: World) -> None:
        shard = world.shard()
        world.apply(shard, 0, 0, 2)
        past = remember(world.tensors)
        world.push(0, 2, 4)
        world.apply(shard, 1, 0, 4)

        go_back(world.tensors, past)
        shard.turn()

        assert world.positions() == {0: 4, 1: 4}
        world.assert_exact()
        shard.turn()
        (event,) = world.events("republished")
        assert event["text"] == (
            "the tensors server came back with version 1; version 3 was published again"
        )

    def test_what_came_back_although_it_is_applied_is_dropped_without_blame(
        self, world: World
    ) -> None:
        shard = world.shard()
        for _ in range(6):
            world.push(0, 0, 1, worker="honest")
            world.push(0, 1, 2, worker="honest")
            past = remember(world.tensors)
            shard.turn()
            go_back(world.tensors, past)
        shard.turn()
        shard.turn()

        world.assert_exact()
        assert world.reader.waiting() == 0
        assert world.jobs.workers.quarantined(world.job) == {}
        assert not world.tensor_keys("u:")

    def test_pins_that_came_back_are_kept_and_the_others_can_be_wanted_again(
        self, world: World
    ) -> None:
        shard = world.shard()
        world.snapshots.request_pin("old")
        shard.turn()
        past = remember(world.tensors)
        world.apply(shard, 0, 0, 2)
        world.snapshots.request_pin("new")
        shard.turn()

        go_back(world.tensors, past)
        shard.turn()
        assert world.snapshots.view().pins == {"old"}
        world.snapshots.request_pin("new")
        shard.turn()

        assert world.snapshots.fetch_pinned("old")[0].meta.version == 0
        assert world.snapshots.fetch_pinned("new")[0].meta.version == 1

    def test_nothing_of_the_lost_history_is_left_behind(self, world: World) -> None:
        shard = world.started_shard()
        past = remember(world.tensors)
        for position in range(3):
            world.apply(shard, 0, position, position + 1)
        go_back(world.tensors, past)

        shard.turn()

        chunks = world.tensor_keys("s:")
        assert len(chunks) == 1
        world.assert_exact()


@pytest.mark.parametrize("at", ["commit", "write"])
def test_the_server_goes_back_in_the_middle_of_a_publication(
    world: World, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = world.started_shard()
    past = remember(world.tensors)
    world.apply(shard, 0, 0, 2)
    world.push(1, 0, 2)
    before = getattr(shard._snapshots, at)

    def go_back_first(*args: Any, **how: Any) -> None:
        go_back(world.tensors, past)
        before(*args, **how)

    monkeypatch.setattr(shard._snapshots, at, go_back_first)
    with pytest.raises(StoreUnavailable, match="has an older state"):
        shard.turn()
    monkeypatch.undo()
    shard.turn()
    shard.turn()

    assert world.positions() == {0: 2, 1: 2}
    world.assert_exact()


def test_what_continues_a_forgotten_update_waits_for_it(world: World, client: ShardLink) -> None:
    """It is refused, because what it continues is gone; neither is trained again."""
    shard = world.started_shard()
    past = remember(world.tensors)
    push(world, client, 0, 0, 2)
    push(world, client, 0, 2, 3)

    go_back(world.tensors, past)
    push(world, client, 0, 3, 4)
    shard.turn()
    assert settle(client).rework == frozenset()
    updates = client.updates
    assert (updates.unapplied, updates.discarded, updates.sent_again) == (0, 0, 2)
    assert world.positions() == {0: 4}
    world.assert_exact()


def test_losses_are_news_after_the_ledger_went_back(world: World) -> None:
    reports, reader = LostWorkers(world.ledger), LostWorkers(world.ledger)
    past = remember(world.ledger)
    reports.report({world.job: ["a", "b"]})
    assert reader.news([world.job]) == {world.job: {"a", "b"}}

    go_back(world.ledger, past)
    assert reader.news([world.job]) == {}
    reports.report({world.job: ["c"]})

    assert reader.news([world.job]) == {world.job: {"c"}}


class TestFences:
    def test_a_takeover_that_was_lost_is_made_good(self, world: World) -> None:
        old = world.started_shard(token=1)
        past = remember(world.tensors)
        new = world.shard(token=2)
        world.apply(new, 0, 0, 2)
        new.turn()

        go_back(world.tensors, past)
        new.turn()

        assert world.tensors.get(world.keys.fence) == b"2"
        with pytest.raises(Fenced):
            old.turn()
        world.assert_exact()

    def test_whoever_is_behind_gives_way_to_whoever_wrote(self, world: World) -> None:
        """The takeover was undone, and the previous server wrote first."""
        old = world.started_shard(token=1)
        past = remember(world.tensors)
        new = world.started_shard(token=2)
        go_back(world.tensors, past)
        world.push(0, 0, 2)
        old._reports.exchange = lambda *_, **__: None
        old.turn()

        with pytest.raises(Fenced):
            new.turn()

        world.assert_exact()


class TestAWorkerKeepsAnUpdateUntilItIsSafe:
    def test_not_only_until_it_is_applied(self, world: World, client: ShardLink) -> None:
        shard = world.started_shard()
        push(world, client, 0, 0, 2)
        shard.turn()
        world.tensors.hset(world.keys.applied, "safe", 0)

        settle(client)
        assert client.updates.unapplied == 1
        shard.turn()  # asks the replicas

        settle(client)
        assert client.updates.unapplied == 0

    def test_both_servers_went_and_the_new_one_begins_from_the_older_state(
        self, world: World, client: ShardLink
    ) -> None:
        shard = world.started_shard()
        past = remember(world.tensors)
        push(world, client, 0, 0, 2)
        push(world, client, 1, 0, 2)
        shard.turn()
        world.tensors.hset(world.keys.applied, "safe", 0)
        settle(client)
        assert client.updates.unapplied == 2

        go_back(world.tensors, past)
        successor = world.started_shard()
        settle(client)
        flush(client)
        successor.turn()
        settle(client)

        assert client.updates.unapplied == 0
        assert client.updates.sent_again == 2
        assert world.positions() == {0: 2, 1: 2}
        world.assert_exact()

    def test_what_it_saw_in_a_lost_history_counts_for_nothing(
        self, world: World, client: ShardLink
    ) -> None:
        """Version 2 of another writer is another version 2."""
        shard = world.started_shard(token=1)
        past = remember(world.tensors)
        push(world, client, 0, 0, 2)
        shard.turn()
        world.tensors.hset(world.keys.applied, "safe", 0)
        settle(client)

        go_back(world.tensors, past)
        successor = world.shard(token=2)
        for position in range(3):
            world.apply(successor, 1, position, position + 1)
        world.push(0, 0, 2)  # another worker had the lease
        successor.turn()
        world.tensors.hset(world.keys.applied, "safe", 3)
        settle(client)
        assert client.updates.unapplied == 1, "it is applied in version 4, which is not safe"

        successor.turn()
        settle(client)
        assert client.updates.unapplied == 0


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(4, 8))]
)
def test_any_history_ends_exact(make_world: MakeWorld, seed: int) -> None:
    """Servers die, go back, or both, at any moment; every sample is applied exactly once."""
    world = make_world(samples=12, epochs=2, subtasks_per_epoch=3)
    chance = random.Random(seed)
    shard = world.shard()
    workers = [HonestWorker(world, name, interval=chance.randint(1, 4)) for name in "abc"]
    pasts = [remember(world.tensors)]

    def turn() -> None:
        nonlocal shard
        match chance.randrange(8):
            case 0:
                go_back(world.tensors, chance.choice(pasts[-3:]))
            case 1:
                shard = world.shard()
            case 2:
                go_back(world.tensors, chance.choice(pasts[-3:]))
                shard = world.shard()
            case 3 | 4:
                pasts.append(remember(world.tensors))
        try:
            shard.turn()
        except Fenced:
            shard = world.shard()
        world.assert_exact()

    for _ in range(30):
        chance.choice(workers).step()
        turn()
        if chance.random() < 0.1:
            world.expire()
    # Leases of what went back expire in time.
    run_to_end(world, workers, lambda: (shard.turn(), world.expire()))
    world.assert_exact()
