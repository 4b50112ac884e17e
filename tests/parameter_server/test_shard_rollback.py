"""The parameter server's shard goes back to an earlier model, because training diverged."""

from __future__ import annotations

import pytest
import torch
from support.world import MakeWorld, World

from vcasgd.errors import Cause
from vcasgd.parameter_server import reports
from vcasgd.storage.checkpoints import StoredCheckpoint


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "TUNED_SECONDS", 0.0)


def diverge(world: World) -> StoredCheckpoint:
    """Apply two updates, of which the checkpoint has the first one, and record a rollback."""
    shard = world.shard()
    world.apply(shard, 0, 0, 2)
    stored = world.checkpoint()
    world.apply(shard, 0, 2, 4)
    assert world.jobs.roll_back(world.job, 1, stored.name, "loss 1 → nan", epoch=1.0)
    return stored


def counts_of(world: World, *positions: tuple[int, int, int]) -> list[float]:
    vector = sum((world.delta(*each) for each in positions), torch.zeros(world.layout.floats))
    counts: list[float] = vector[: world.plan.samples].tolist()
    return counts


def test_the_weights_go_back_and_the_record_stays(world: World) -> None:
    diverge(world)

    world.shard().turn()

    snapshot = world.snapshots.read()
    assert world.counts() == counts_of(world, (0, 0, 2))
    assert world.positions(snapshot.record) == {0: 4}
    assert (snapshot.meta.version, snapshot.meta.rollbacks) == (3, 1)
    assert snapshot.meta.totals.samples == 4
    # The counter of local steps is that of the checkpoint.
    assert snapshot.meta.integer_vector().tolist() == [2]
    (event,) = world.events("rolled-back")
    assert event["details"]["epoch"] == 1.0


def test_it_goes_back_once(world: World) -> None:
    stored = diverge(world)
    shard = world.started_shard()
    world.apply(shard, 0, 4, 6, rollbacks=1)

    assert not world.jobs.roll_back(world.job, 1, stored.name, "again")
    world.shard().turn()

    assert world.counts() == counts_of(world, (0, 0, 2), (0, 4, 6))
    assert len(world.events("rolled-back")) == 1


def test_updates_of_the_model_that_diverged_are_refused_and_blame_no_worker(world: World) -> None:
    diverge(world)
    shard = world.shard()
    late = []
    for _ in range(6):
        late.append(world.push(1, 0, 2)[0])
        shard.turn()

    assert {world.fate(each) for each in late} == {"rejected:rolled-back"}
    assert world.rejected() == {"rolled-back": 6}
    assert world.jobs.workers.quarantined(world.job) == {}
    assert not world.events("update-rejected")
    # The samples can be trained again.
    assert world.push(1, 0, 2, rollbacks=1)[1].accepted
    shard.turn()
    assert world.counts() == counts_of(world, (0, 0, 2), (1, 0, 2))


def test_the_state_of_the_rule_starts_again(make_world: MakeWorld) -> None:
    world = make_world(update={"rule": "sma"})
    diverge(world)

    world.shard().turn()

    meta = world.snapshots.read().meta
    state = world.snapshots.fetch_state(meta)
    assert meta.rollbacks == 1
    assert state is not None
    assert not state.any()


def test_the_average_goes_back_with_its_model(make_world: MakeWorld) -> None:
    world = make_world(ema=0.5)
    diverge(world)

    world.shard().turn()

    state = world.snapshots.fetch_state(world.snapshots.read().meta)
    stored = world.checkpoints.all()[0]
    assert state is not None
    assert torch.equal(state, world.checkpoints.read(stored.name).state)


def test_a_checkpoint_of_the_model_that_diverged_is_rolled_back_again(world: World) -> None:
    # Given a later checkpoint of a model that diverged, and a rollback before it
    diverge(world)
    world.checkpoint()
    world.shard().turn()

    world.lose_tensors()
    world.shard().turn()

    # Then the model is restored from the later one, and goes back from there
    (event,) = world.events("restored")
    assert event["details"]["version"] == 2
    assert world.snapshots.read().meta.rollbacks == 1
    assert world.counts() == counts_of(world, (0, 0, 2))
    assert world.positions() == {0: 4}


def test_a_damaged_checkpoint_fails_the_job(world: World) -> None:
    stored = diverge(world)
    path = f"jobs/{world.job}/checkpoints/{stored.name}"
    world.storage.put(path, world.storage.get(path)[:-1])
    shard = world.shard()

    for _ in range(3):
        shard.turn()

    (failure,) = world.jobs.failures(world.job)
    assert failure.fault is Cause.JOB
    assert failure.message.startswith("training diverged, and the model to go back to can't be")


def test_only_a_running_job_goes_back(world: World) -> None:
    stored = diverge(world)
    world.jobs.pause(world.job)

    assert not world.jobs.roll_back(world.job, 2, stored.name, "too late")
    assert world.jobs.get(world.job).tuned.rollbacks == 1
