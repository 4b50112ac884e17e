"""Pins in the parameter server's shard."""

from __future__ import annotations

import pytest
from support.world import MakeWorld, World

from vcasgd.errors import JobUnreadable
from vcasgd.limits import MAX_ENTRIES, MAX_PIN_REQUESTS
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.ledger.leases import Evaluations
from vcasgd.store.tensors.snapshot_index import MAX_PINS


def test_a_flood_of_requests_for_pins_ends_its_job_and_is_never_read_whole(world: World) -> None:
    world.started_shard()
    names = [f"flood {number}" * 10 for number in range(MAX_ENTRIES + 1)]
    for first in range(0, len(names), 10_000):
        world.tensors.sadd(world.keys.pin_requests, *names[first : first + 10_000])
    world.tensors.sadd(world.keys.pin_requests, b"x" * 1000, b"\xff")

    assert len(world.snapshots.view().pin_requests) <= MAX_PIN_REQUESTS
    with pytest.raises(JobUnreadable, match="entries of pin-requests"):
        world.shard().turn()

    assert not world.tensors.exists(world.keys.pin_requests)


def pin(world: World, shard: Shard, *names: str) -> None:
    for name in names:
        world.snapshots.request_pin(name)
    shard.turn()


def unpin(world: World, shard: Shard, name: str) -> None:
    world.snapshots.unpin(name)
    shard.turn()


class TestPins:
    def test_wanted_ones_are_kept_while_training_goes_on(self, world: World) -> None:
        shard = world.shard(token=1)
        world.apply(shard, 0, 0, 1)
        pin(world, shard, "periodic")
        for position in (1, 2, 3):
            world.apply(shard, 0, position, position + 1)

        snapshot, floats = world.snapshots.fetch_pinned("periodic")

        assert snapshot.meta.version == 1
        assert floats[:-1].tolist() == world.expected_counts(snapshot.record)
        assert world.tensor_keys("s:") == {"s:1.1:0", "s:3.1:0", "s:4.1:0"}

        unpin(world, shard, "periodic")
        assert world.tensor_keys("s:") == {"s:3.1:0", "s:4.1:0"}

    def test_one_that_is_wanted_again_while_it_is_kept_leaks_nothing(self, world: World) -> None:
        shard = world.started_shard(token=1)
        for position in range(4):
            pin(world, shard, "periodic")
            world.apply(shard, 0, position, position + 1)
        assert world.snapshots.fetch_pinned("periodic")[0].meta.version == 0

        unpin(world, shard, "periodic")

        assert world.tensor_keys("s:") == {"s:3.1:0", "s:4.1:0"}

    def test_the_present_one_outlives_its_pin(self, world: World) -> None:
        shard = world.shard()
        world.apply(shard, 0, 0, 1)
        pin(world, shard, "periodic")
        world.apply(shard, 1, 0, 1, checksum=1)  # changes the totals, not the version

        unpin(world, shard, "periodic")

        world.assert_exact()

    def test_the_previous_one_outlives_its_pin(self, world: World) -> None:
        """A worker may still be reading it."""
        shard = world.started_shard(token=1)
        pin(world, shard, "periodic")
        world.apply(shard, 0, 0, 1)

        unpin(world, shard, "periodic")

        assert world.tensor_keys("s:") == {"s:0.0:0", "s:1.1:0"}
        world.apply(shard, 0, 1, 2)
        assert world.tensor_keys("s:") == {"s:1.1:0", "s:2.1:0"}

    def test_two_names_for_one(self, world: World) -> None:
        shard = world.started_shard()
        pin(world, shard, *"ab")
        for position in range(3):
            world.apply(shard, 0, position, position + 1)

        unpin(world, shard, "a")

        assert world.snapshots.fetch_pinned("b")[0].meta.version == 0

    def test_there_are_never_too_many(self, world: World) -> None:
        shard = world.started_shard()
        pin(world, shard, *"abcdef")
        assert world.snapshots.view().pins == set("abcd"[:MAX_PINS])

        unpin(world, shard, "a")

        assert world.snapshots.view().pins == set("bcde")
        assert world.snapshots.view().pin_requests == ("f",)

    def test_an_epoch_that_finds_no_room_is_published_unpinned(self, world: World) -> None:
        shard = world.started_shard()
        pin(world, shard, *"abcd")
        for subtask in range(3):
            world.push(subtask, 0, 4)
        shard.turn()

        assert world.snapshots.read().record.finished == 1
        assert world.snapshots.view().pins == set("abcd")

    def test_a_new_server_knows_them(self, world: World) -> None:
        first = world.started_shard(token=1)
        pin(world, first, "a")
        second = world.shard(token=2)
        for position in (0, 1, 2):
            world.apply(second, 0, position, position + 1)
        assert world.snapshots.fetch_pinned("a")[0].meta.version == 0

        unpin(world, second, "a")

        assert world.tensor_keys("s:") == {"s:2.2:0", "s:3.2:0"}


class TestEvaluationPoints:
    def test_an_evaluation_point_gets_a_version_of_its_own(self, make_world: MakeWorld) -> None:
        world = make_world(evaluate={"every": "5 samples"})
        for subtask in (0, 1, 2, 3):
            world.push(subtask, 0, 4)
        shard = world.shard()

        # 8 samples pass the point 5, and 12 pass the point 10
        assert [shard.turn() for _ in range(4)] == [2, 1, 1, 0]

        assert sorted(world.snapshots.pins()) == ["samples-10", "samples-15", "samples-5"]
        for name, samples in (("samples-5", 8), ("samples-10", 12), ("samples-15", 16)):
            pinned, floats = world.snapshots.fetch_pinned(name)
            assert pinned.meta.exact
            assert pinned.meta.totals.samples == samples
            assert floats[: world.plan.samples].tolist() == world.expected_counts(pinned.record)

    def test_points_are_left_out_while_evaluations_do_not_keep_up(
        self, make_world: MakeWorld
    ) -> None:
        # Given a job that reaches a point with each update, and no evaluation
        world = make_world(evaluate={"every": "2 samples"})
        shard, evaluations = world.shard(), Evaluations(world.ledger, world.job)
        for subtask in range(6):
            world.push(subtask, 0, 2)
            world.push(subtask, 2, 4)

        assert [shard.turn() for _ in range(13)] == [1] * 12 + [0]

        # Then the first ones are pinned, later ones are left out, and the last one is evaluated
        assert sorted(world.snapshots.pins()) == [f"samples-{n}" for n in (2, 4, 6, 8)]
        assert evaluations.read() == ({2, 4, 6, 8, 24}, frozenset())
        # and a new parameter server does not open those again
        world.shard().turn()
        assert evaluations.read() == ({2, 4, 6, 8, 24}, frozenset())
