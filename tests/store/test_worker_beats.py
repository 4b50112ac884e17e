"""Heartbeats that are read incrementally are those in the ledger, whatever happened meanwhile."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.work import calls_of
from support.world import World

from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.traffic import Traffic
from vcasgd.store.ledger.worker_beats import WorkerBeats, read_beats

WORKERS = st.sampled_from("abcd")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("renew"), WORKERS, st.integers(0, 5)),
        st.tuples(st.just("remove"), WORKERS, st.just(0)),
        st.tuples(st.just("read"), st.just(""), st.just(0)),
    ),
    max_size=20,
)


def renew(world: World, worker: str, samples: int = 0) -> None:
    world.leases(worker).renew({"at": 1.0, "samples": samples, "pushed_bytes": samples}, [])


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(actions=ACTIONS)
def test_beats_are_those_in_the_ledger(world: World, actions: list[tuple[str, str, int]]) -> None:
    world.ledger.delete(world.ledger_keys.workers, world.ledger_keys.beats)
    beats = WorkerBeats(world.ledger)
    for action, worker, samples in actions:
        if action == "renew":
            renew(world, worker, samples)
        elif action == "remove":
            world.jobs.workers.remove(world.job, worker)
        else:
            assert beats.of(world.job) == world.jobs.workers.heartbeats(world.job)
    assert beats.of(world.job) == world.jobs.workers.heartbeats(world.job)
    assert beats.traffic(world.job) == WorkerBeats(world.ledger).traffic(world.job)


def test_a_ledger_of_an_earlier_state_is_read_again(world: World) -> None:
    beats = WorkerBeats(world.ledger)
    renew(world, "a", 1)
    keys = (world.ledger_keys.workers, world.ledger_keys.beats)
    earlier = [world.ledger.dump(key) for key in keys]
    renew(world, "a", 2)
    renew(world, "b", 3)
    assert beats.of(world.job).keys() == {"a", "b"}

    for key, content in zip(keys, earlier, strict=True):
        world.ledger.restore(key, 0, content, replace=True)
    assert beats.of(world.job) == {"a": Heartbeat(at=1.0, samples=1, pushed_bytes=1)}
    renew(world, "a", 4)
    assert beats.of(world.job)["a"].samples == 4


def test_hostile_numbers_and_names_only_cost_their_own_job_time(world: World) -> None:
    beats, keys = WorkerBeats(world.ledger), world.ledger_keys
    for number in (float("inf"), 2.0**60, float("-inf"), -5.0):
        world.ledger.zadd(keys.beats, {"": number, "nobody": number})
        renew(world, "a", 1)
        assert beats.of(world.job)["a"].samples == 1
        renew(world, "a", 2)
        assert beats.of(world.job)["a"].samples == 2
    world.ledger.hset(keys.workers, mapping={"": "{}", "no name": "{}", "b": "{", "c": "{}"})
    assert beats.of(world.job).keys() == {"a", "c"}
    assert beats.traffic(world.job) == Traffic(2, 0)


def test_only_changes_are_read(world: World) -> None:
    def work_of_one_change(workers: int) -> int:
        for number in range(workers):
            renew(world, f"w{number}")
        beats = WorkerBeats(world.ledger)
        beats.of(world.job)
        renew(world, "w0")
        return calls_of(lambda: beats.of(world.job))

    # A few calls depend on what the connection has done before.
    assert work_of_one_change(400) < 1.1 * work_of_one_change(20)


def test_some_heartbeats_are_read_at_once(world: World) -> None:
    renew(world, "a", 1)
    world.ledger.hset(world.ledger_keys.workers, "b", "{")
    asked = [(world.job, "a"), (world.job, "b"), ("other", "a")]
    assert read_beats(world.ledger, asked) == {
        (world.job, "a"): Heartbeat(at=1.0, samples=1, pushed_bytes=1)
    }
