"""Push slots: back-pressure by the memory of the tensors server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import KINDS, running_server, url_of
from support.shard_links import link_of
from support.waiting import PATIENCE, await_truth
from support.world import World

from vcasgd.errors import SnapshotMissing, StoreFull
from vcasgd.store.connection import connect
from vcasgd.store.tensors import updates as module
from vcasgd.store.tensors.updates import MAX_SLOTS, PushSlots, window

MIB = 1 << 20
#: Slots of 128 MiB without readers.
MAX_WAITING = window(128 * MIB, 0, 2 * MIB, 2 * MIB)


@pytest.mark.parametrize(
    ("limit", "clients", "model", "payload", "share", "places"),
    [
        pytest.param(0, 5, MIB, MIB, 1.0, MAX_SLOTS, id="no limit"),
        # 900 usable, 20 for five readers, 6.5 × 64 for snapshots and moments, 65 per slot
        pytest.param(1000 * MIB, 10, 64 * MIB, 64 * MIB, 1.0, 7, id="one job"),
        pytest.param(1000 * MIB, 10, 64 * MIB, 32 * MIB, 1.0, 14, id="a smaller encoding"),
        pytest.param(2000 * MIB, 10, 64 * MIB, 64 * MIB, 0.5, 7, id="two jobs"),
        # 900 usable, 20 for five readers, 7.5 × 15 for snapshots and moments, 16 per slot
        pytest.param(1000 * MIB, 10, 15 * MIB, 15 * MIB, 1.0, 47, id="small"),
        pytest.param(100 * MIB, 10, 64 * MIB, 64 * MIB, 1.0, 1, id="too small"),
        pytest.param(1000 * MIB, 500, 64 * MIB, 64 * MIB, 1.0, 1, id="many connections"),
        pytest.param(1 << 50, 1, 4, 4, 1.0, MAX_SLOTS, id="far more than needed"),
        pytest.param(1 << 50, 1, 0, 0, 1.0, MAX_SLOTS, id="an empty model"),
    ],
)
def test_the_window(
    limit: int, clients: int, model: int, payload: int, share: float, places: int
) -> None:
    assert window(limit, clients, model, payload, share) == places


@pytest.fixture
def places(world: World) -> PushSlots:
    return PushSlots(world.tensors, world.keys)


def held(world: World) -> dict[str, float]:
    found = world.tensors.zrange(world.keys.push_slots, 0, -1, withscores=True)
    return {name.decode(): until for name, until in found}


class TestPlaces:
    def test_when_all_are_taken_a_push_waits_and_nothing_is_written(self, world: World) -> None:
        world.tensors.set(world.keys.window, 2)
        world.push(0, 0, 1)
        world.push(1, 0, 1)
        header, payload = world.update(2, 0, 1, 1)

        # A payload that isn't sent together with the request for its slot
        with pytest.raises(StoreFull, match="room for"):
            world.sender.push(header, 0, payload, ["earlier"])

        assert len(world.tensor_keys("u:")) == 2
        world.shard().turn()
        assert world.push(2, 0, 1)[1].accepted
        assert list(held(world).values()) == [float("inf")]

    def test_a_large_update_waits_for_the_workers_last_one(self, world: World) -> None:
        first, _ = world.push(0, 0, 1)
        header, payload = world.update(0, 1, 2, 1)

        with pytest.raises(StoreFull):
            world.sender.push(header, 0, payload, [first.update])

        assert len(world.tensor_keys("u:")) == 1
        world.shard().turn()
        assert world.sender.push(header, 0, payload, [first.update]).accepted

    def test_a_worker_that_fell_silent_loses_its_place_and_what_it_wrote(
        self, world: World, places: PushSlots, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "SLOT_SECONDS", -1.0)
        assert places.take("silent")
        monkeypatch.undo()
        assert places.take("busy")
        for name in ("silent", "busy"):
            for index in range(2):
                world.tensors.set(world.keys.payload_chunk(name, index), b"x")

        assert places.reap(2) == 1

        assert list(held(world)) == ["busy"]
        assert world.tensor_keys("u:") == {"u:busy:0", "u:busy:1"}

    def test_places_that_a_rogue_holds_for_ever_come_back(
        self, world: World, places: PushSlots
    ) -> None:
        """The worker pushed a header with another update's name."""
        world.tensors.zadd(world.keys.push_slots, {"ghost": "inf"})
        world.push(0, 0, 1)
        assert places.reap(1) == 0, "something is in the stream"
        world.shard().turn()

        assert places.reap(1) == 1
        assert not held(world)

    def test_a_model_that_goes_in_the_middle_of_a_push_takes_what_was_written_with_it(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = world.sender._push

        def forget_first(**arguments: object) -> object:
            world.tensors.delete(world.keys.meta, world.keys.applied, world.keys.fence)
            return script(**arguments)

        header, payload = world.update(0, 0, 1, 1)
        monkeypatch.setattr(world.sender, "_push", forget_first)
        with pytest.raises(SnapshotMissing):
            world.sender.push(header, 0, payload, ["earlier"])

        assert not held(world)
        assert not world.tensor_keys("u:")


@pytest.fixture(params=KINDS)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A tensors server that holds 128 MiB, for a model of 2 MiB."""
    with running_server(request.param, tmp_path / "server") as server:
        server.connection.config_set("maxmemory", "128mb")
        clients = connect(url_of(server, 0)), connect(url_of(server, 1))
        yield World(*clients, tmp_path / "storage", samples=1 << 19, subtasks_per_epoch=128)
        for client in clients:
            client.close()


def test_a_chunk_takes_as_much_memory_as_it_is_long(small: World) -> None:
    small.started_shard()
    header, _ = small.push(0, 0, 1)

    key = small.keys.payload_chunk(header.update, 0)
    assert small.tensors.memory_usage(key) < 1.01 * small.tensors.strlen(key)


def test_32_workers_as_fast_as_they_can_under_a_memory_limit(small: World) -> None:
    """Their 64 payloads of 2 MiB do not fit, but the server never runs out of memory."""
    workers, each = 32, 2
    shard = small.started_shard()
    clients = [link_of(small) for _ in range(workers)]
    try:
        for subtask in range(workers * each):
            header, payload = small.update(subtask, 0, small.plan.size(subtask), 1)
            clients[subtask % workers].push(header, 0, payload)
        waited = await_truth(lambda: (now := small.reader.waiting()) > 1 and now)
        deadline = time.monotonic() + PATIENCE
        while small.snapshots.version() < workers * each and time.monotonic() < deadline:
            waited = max(waited, small.reader.waiting())
            shard.turn()
    finally:
        for client in clients:
            client.close()

    assert small.snapshots.version() == workers * each
    small.assert_exact()
    assert not small.rejected()
    assert 1 < waited <= MAX_WAITING
    assert "errorstat_OOM" not in small.tensors.info("errorstats")
