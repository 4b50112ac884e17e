"""Samples that a shard counts for the people whose machines they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.world import World

from vcasgd.parameter_server import shard as shard_module
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.ledger.contributors import Contributors
from vcasgd.store.tensors.snapshot import Record, UpdateTotals

MakeWorld = Callable[..., World]


class VolunteersOfWorld:
    """A job, and the workers of two people, the first with two machines."""

    def __init__(self, make_world: MakeWorld) -> None:
        self.world = world = make_world()
        self.contributors = Contributors(world.ledger)
        self.ann, self.other, self.bob = (
            f"{world.job}.join-{name}" for name in ("ann-1", "ann-2", "bob-1")
        )
        tokens = {self.ann: "ann", self.other: "ann", self.bob: "bob"}
        self.contributors.place({world.job: tokens})

    def push(self, shard: Shard, subtask: int, start: int, stop: int, worker: str) -> None:
        self.world.push(subtask, start, stop, worker=worker)
        shard.turn()

    def counted(self) -> list[int]:
        """Samples of Ann and of Bob in the ledger, where pages find them."""
        counts = self.world.jobs.get(self.world.job).totals["contributions"]
        of_worker = partial(self.contributors.of_worker, self.world.job)
        contributors = [of_worker(self.ann), of_worker(self.bob)]
        assert counts.keys() <= set(contributors)
        return [counts.get(each, 0) for each in contributors]


def test_applied_samples_count_for_the_owner_and_outlive_the_server(make_world: MakeWorld) -> None:
    # Given two people with three machines, and one machine of the cluster
    people = VolunteersOfWorld(make_world)
    world, shard = people.world, people.world.shard()

    # When they push, one of them the same samples again, and more than a subtask has
    people.push(shard, 0, 0, 3, people.ann)
    people.push(shard, 1, 0, 4, people.other)
    people.push(shard, 0, 3, 4, people.bob)
    people.push(shard, 0, 3, 4, people.bob)
    people.push(shard, 2, 0, 400, people.bob)
    people.push(shard, 2, 0, 2, f"{world.job}.m-1")

    # Then exactly what was applied is counted, also by the next server
    assert people.counted() == [7, 1]
    assert world.snapshots.read().meta.totals.samples == 10
    again = world.shard()
    people.push(again, 2, 2, 4, people.bob)
    assert people.counted() == [7, 3]


def test_samples_that_are_undone_no_longer_count(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a checkpoint, and a contribution before and after it
    monkeypatch.setattr(shard_module, "TUNED_SECONDS", 0.0)
    people = VolunteersOfWorld(make_world)
    world, shard = people.world, people.world.shard()
    people.push(shard, 0, 0, 4, people.ann)
    stored = world.checkpoint()
    people.push(shard, 1, 0, 4, people.bob)
    assert people.counted() == [4, 4]

    # When the job goes back to it, because an owner's work was wrong
    assert world.jobs.roll_back(world.job, 1, stored.name, "", restorations=1, undone=["bob"])
    shard.turn()
    shard.turn()

    # Then the work since then counts for nobody
    assert people.counted() == [4, 0]


def test_a_worker_cannot_make_up_contributions_in_the_first_snapshot(
    make_world: MakeWorld,
) -> None:
    # Given a first snapshot, which a worker writes, with samples for its own contributor
    people = VolunteersOfWorld(make_world)
    world = people.world
    own = people.contributors.of_worker(world.job, people.bob)
    assert own is not None
    for key in world.tensor_keys():
        world.tensors.unlink(world.keys.prefix + key)
    forged = replace(world.first_meta(), totals=UpdateTotals(contributions={own: 10**6}))
    assert world.snapshots.install(0, forged, Record(), torch.zeros(world.layout.floats))

    # When a server takes over
    shard = world.shard()
    people.push(shard, 0, 0, 4, people.ann)

    # Then they don't count
    assert people.counted() == [4, 0]
