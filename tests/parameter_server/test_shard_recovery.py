"""The parameter server's shard after a restart, and after its servers were lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.waiting import await_truth
from support.world import MakeWorld, World

from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StorageUnavailable,
    StoreFull,
    StoreUnavailable,
)
from vcasgd.store.ledger.retention import Retention


class HeldReads(Executor):
    """Runs calls when a test says so."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        while self._calls:
            self._calls.pop()()


class TestReadsACheckpointBesideOtherJobs:
    def test_a_turn_does_not_wait_for_it(self, world: World) -> None:
        world.push(0, 0, 2)
        world.shard().turn()
        world.checkpoint()
        world.lose_tensors()
        reads = HeldReads()
        shard = world.shard(readers=reads)

        for _ in range(2):
            assert shard.turn() == 0
            assert shard.reading
        assert not shard.awaits_first_snapshot
        reads.run()
        assert not shard.reading
        shard.turn()

        assert world.positions() == {0: 2}
        (event,) = world.events("restored")
        assert event["details"]["version"] == 1

    def test_a_server_that_was_replaced_meanwhile_writes_nothing(self, world: World) -> None:
        world.push(0, 0, 2)
        world.shard().turn()
        world.checkpoint()
        world.lose_tensors()
        reads = HeldReads()
        old = world.started_shard(readers=reads)
        world.shard().turn()
        world.push(0, 2, 4)

        reads.run()
        with pytest.raises(Fenced):
            old.turn()

        assert len(world.events("restored")) == 1

    def test_a_model_that_comes_back_meanwhile_counts(self, world: World) -> None:
        # Given a server that reads the newest checkpoint, because there is no model
        world.push(0, 0, 2)
        world.shard().turn()
        first = world.checkpoint()
        world.push(0, 2, 4)
        world.shard().turn()
        kept = {key: world.tensors.dump(key) for key in world.tensors.scan_iter()}
        world.lose_tensors()
        reads = HeldReads()
        shard = world.started_shard(readers=reads)

        # When the model is available again, and has to go back to another checkpoint
        for key, value in kept.items():
            world.tensors.restore(key, 0, value, replace=True)
        assert world.jobs.roll_back(world.job, 1, first.name, "loss 1 → nan")
        for _ in range(4):
            reads.run()
            shard.turn()

        # Then both are used for what they were read for
        assert not world.events("restored")
        snapshot = world.snapshots.read()
        assert (snapshot.meta.version, snapshot.meta.rollbacks) == (3, 1)
        assert world.positions(snapshot.record) == {0: 4}


@pytest.mark.parametrize("name", ["x", "1:0", "1.x:0", f"1.{'9' * 5000}:0", "1.²:0"])
def test_what_the_first_worker_wrote_beside_its_snapshot_is_removed(
    world: World, name: str
) -> None:
    world.tensors.set(f"{world.keys.prefix}s:{name}", "x")

    world.shard().turn()

    assert world.tensor_keys("s:") == {"s:0.0:0"}


def test_what_an_interrupted_publication_left_is_removed(world: World) -> None:
    world.started_shard(token=1)
    meta = world.snapshots.read().meta
    world.snapshots.write(
        type(meta)(5, 1, meta.floats, meta.parameters, meta.layout),
        torch.zeros(meta.floats),
    )

    world.shard(token=2).turn()

    assert world.tensor_keys("s:") == {"s:0.0:0"}


class TestEmptyTensorsServer:
    def test_lost_answer_to_the_publication(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a pinned version on a server that came back empty
        shard = world.shard()
        world.apply(shard, 0, 0, 4)
        world.snapshots.request_pin("a")
        shard.turn()
        world.lose_tensors()
        install = shard._snapshots.install

        def lose_the_answer(*args: Any, **options: Any) -> None:
            install(*args, **options)
            raise StoreUnavailable("the answer was lost")

        # When the answer to its new publication is lost
        with monkeypatch.context() as patch:
            patch.setattr(shard._snapshots, "install", lose_the_answer)
            with pytest.raises(StoreUnavailable):
                shard.turn()
        shard.turn()
        world.apply(shard, 1, 0, 4)
        shard.turn()

        # Then it is reported once, and the pin can be wanted again
        (event,) = world.events("republished")
        assert event["details"]["version"] == 1
        world.snapshots.request_pin("a")
        shard.turn()
        assert world.snapshots.fetch_pinned("a")[0].meta.version == 2
        world.assert_exact()

    def test_what_was_claimed_but_not_published_is_not_lost(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is in the parameter server's memory, which is published again."""
        shard = world.started_shard()
        world.push(0, 0, 4)
        commit = shard._snapshots.commit

        def lose_everything_first(*args: Any) -> None:
            world.lose_tensors()
            commit(*args)

        monkeypatch.setattr(shard._snapshots, "commit", lose_everything_first)
        with pytest.raises(SnapshotMissing):
            shard.turn()
        monkeypatch.undo()
        shard.turn()
        shard.turn()

        assert world.positions() == {0: 4}
        world.assert_exact()
        assert world.jobs.get(world.job).version == 1
        assert list(world.partition().done) == [0]

    @pytest.mark.parametrize("deleted", [False, True])
    def test_a_job_that_has_ended_is_not_published_again(self, world: World, deleted: bool) -> None:
        shard = world.started_shard()
        world.jobs.cancel(world.job)
        if deleted:
            Retention(world.ledger).delete(world.job)
        # As the controller does; a worker shares its moments a moment later.
        world.lose_tensors()
        world.tensors.set(world.keys.moments("steps"), "0:1")

        shard.turn()
        assert not world.tensor_keys("s:")
        shard.close()
        assert not world.tensor_keys()

    @pytest.mark.parametrize("first", ["old", "new"])
    def test_a_zombie_does_not_bring_back_the_past(self, world: World, first: str) -> None:
        """The fence was lost with the server, but the ledger has the newest token."""
        old = world.started_shard(token=1)
        new = world.shard(token=2)
        world.apply(new, 0, 0, 4)
        world.lose_tensors()

        if first == "new":
            new.turn()
        with pytest.raises(Fenced):
            old.turn()
        new.turn()

        world.assert_exact()
        assert world.positions() == {0: 4}

    def test_an_old_memory_of_the_same_version_is_not_taken_for_the_own(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the ledger, a fenced server may publish an update that it could not commit."""
        old = world.started_shard(token=1)
        lost, _ = world.push(0, 0, 2)
        with monkeypatch.context() as patch:
            patch.setattr(old._snapshots, "commit", _never)
            with pytest.raises(StoreUnavailable):
                old.turn()
        world.tensors.delete(world.keys.payload_chunk(lost.update, 0))
        new = world.started_shard(token=2)
        world.apply(new, 1, 0, 2)
        assert world.positions() == {1: 2}
        world.lose_tensors()
        world.ledger.hset(world.ledger_keys.shards, "0:token", 1)
        old.turn()
        assert world.positions() == {0: 2}
        world.push(2, 0, 2)

        with pytest.raises(Fenced, match="was not written by this server"):
            new.turn()

        world.shard(token=3).turn()
        assert world.positions() == {0: 2, 2: 2}
        world.assert_exact()


def _never(*_args: object) -> None:
    raise StoreUnavailable("frozen")


class TestBothServersLost:
    def test_a_damaged_checkpoint_is_passed_over_with_an_event(
        self, world: World, tmp_path: Path
    ) -> None:
        shard = world.shard()
        world.apply(shard, 0, 0, 2)
        whole = world.checkpoint()
        world.apply(shard, 0, 2, 4)
        damaged = world.checkpoint()
        path = tmp_path / "storage" / "jobs" / world.job / "checkpoints" / damaged.name
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        world.lose_tensors()

        world.shard().turn()

        assert world.positions() == {0: 2}
        world.assert_exact()
        (event,) = world.events("checkpoint-damaged")
        assert damaged.name in event["text"]
        assert whole.name in world.events("restored")[0]["text"]

    def test_a_storage_that_is_away_is_asked_again(
        self, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shard = world.shard()
        world.apply(shard, 0, 0, 2)
        world.checkpoint()
        world.lose_tensors()
        second = world.shard()

        def away(prefix: str) -> dict[str, int]:
            raise StorageUnavailable(f"object storage: {prefix}: no route to host")

        monkeypatch.setattr(world.storage, "names", away)
        with pytest.raises(StorageUnavailable):
            second.turn()
        monkeypatch.undo()
        second.turn()

        assert world.positions() == {0: 2}
        assert world.events("restarted") == [], "a failed request is not an empty storage"


def test_a_new_server_makes_room_in_a_full_tensors_server(world: World) -> None:
    # Given a publication that was interrupted, an update that can't be applied, and no room
    world.started_shard(token=1)
    world.tensors.set(world.keys.snapshot_chunk(1, 1, "0"), bytes(100))
    world.push(0, 0, 4, checksum=1)
    world.snapshots.request_pin("a")
    world.tensors.over_limit = True
    world.tensors.config_set("maxmemory", "1")
    try:
        # When another parameter server takes over
        world.shard(token=2).turn()
        world.shard(token=3).turn()

        # Then both are gone, and what takes no room is done
        assert world.tensor_keys("s:") == {"s:0.0:0"}
        assert not world.tensor_keys("u:")
        assert world.snapshots.pins().keys() == {"a"}
    finally:
        world.tensors.config_set("maxmemory", "0")
        world.tensors.over_limit = False


def test_a_version_takes_the_room_of_the_one_before_if_there_is_no_other(
    make_world: MakeWorld,
) -> None:
    # Given two versions of 1 MB, an update of the same size, and no room for another version
    world = make_world(samples=250_000)
    shard = world.started_shard()
    world.apply(shard, 0, 0, 2)
    world.push(0, 2, 4)
    used = world.tensors.info("memory")["used_memory"]
    world.tensors.config_set("maxmemory", used + (1 << 18))

    def published() -> bool:
        with suppress(StoreFull):
            shard.turn()
        return world.positions() == {0: 4}

    try:
        assert not published()
        await_truth(published, timeout=30)
    finally:
        world.tensors.config_set("maxmemory", "0")
    world.assert_exact()


def test_a_full_tensors_server_stops_nothing_for_good(world: World) -> None:
    shard = world.started_shard()
    world.push(0, 0, 4)
    world.tensors.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreFull):
            shard.turn()
        with pytest.raises(StoreFull):
            shard.turn()
    finally:
        world.tensors.config_set("maxmemory", "0")

    shard.turn()

    assert world.positions() == {0: 4}
    world.assert_exact()
