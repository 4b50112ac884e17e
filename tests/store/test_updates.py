"""Pushes: which updates are accepted or refused, and which status they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.world import MakeWorld, World

from vcasgd.errors import Fenced, InvalidUpdate, StoreFull, StoreUnavailable
from vcasgd.store.tensors import chunks
from vcasgd.store.tensors.chunks import CHUNK_BYTES, chunk_count
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot_store import ONLY_CHUNK
from vcasgd.store.tensors.updates import (
    NO_COMMIT,
    PAYLOAD_SECONDS,
    PushResult,
    PushSlots,
    wait_for_entries,
)

#: An earlier update, after which one is not pushed in a single round trip.
AFTER = ["earlier"]
#: Values that the stack of a script has room for (LUAI_MAXCSTACK).
MAX_UNPACKED = 8000


def interrupt_push(world: World, header: Header, payload: memoryview) -> None:
    """Write a payload as a worker does that dies before it writes the entry."""

    def die(**_arguments: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.sender, "_push", die)
        with pytest.raises(KeyboardInterrupt):
            world.sender.push(header, 0, payload, AFTER)


class TestBegin:
    def test_goes_on_behind_what_waits_and_what_is_applied(self, world: World) -> None:
        world.push(0, 0, 3)
        assert world.sender.begin(0, 0, 4, 2) == 3

        world.shard().turn()

        assert world.sender.begin(0, 0, 4, 2) == 3

    def test_there_is_nothing_to_do_in_a_finished_epoch(self, world: World) -> None:
        for subtask in range(3):
            world.push(subtask, 0, 4)
        world.shard().turn()

        assert world.sender.begin(1, 0, 4, 2) == 4
        _, pushed = world.push(1, 0, 4)
        assert pushed == PushResult(accepted=False, position=-1)
        assert not world.tensor_keys("u:")

    def test_fences_older_leases_of_the_subtask_and_of_no_other(self, world: World) -> None:
        world.sender.begin(0, 0, 4, token=7)

        with pytest.raises(Fenced, match="subtask 0 has a newer lease"):
            world.sender.begin(0, 0, 4, token=6)
        with pytest.raises(Fenced, match="subtask 0 has a newer lease"):
            world.push(0, 0, 4, token=6)
        assert world.sender.begin(1, 0, 4, token=6) == 0
        assert not world.tensor_keys("u:"), "the refused payload is gone"


class TestPush:
    def test_accepted_it_waits_in_the_stream(self, world: World) -> None:
        header, pushed = world.push(0, 0, 3)

        assert pushed == PushResult(accepted=True, position=3)
        (entry,) = world.reader.read(10)
        assert Header.parse(entry.header) == header
        assert world.receive(header, header.size) == bytes(world.codec.encode(world.delta(0, 0, 3)))
        assert world.reader.waiting() == 1

    def test_the_same_update_again_is_accepted_without_effect(self, world: World) -> None:
        header, payload = world.update(0, 0, 3, 1)

        answers = [world.sender.push(header, 0, payload) for _ in range(3)]

        assert answers == [PushResult(accepted=True, position=3)] * 3
        assert world.reader.waiting() == 1

        world.shard().turn()
        assert world.sender.push(header, 0, payload).accepted
        assert world.reader.waiting() == 0
        assert not world.tensor_keys("u:")

    def test_again_after_another_worker_went_on_behind_it(self, world: World) -> None:
        """The first answer was lost, then the lease; the update still waits."""
        header, payload = world.update(0, 0, 2, token=1)
        world.sender.push(header, 0, payload)
        assert world.sender.begin(0, 0, 4, token=2) == 2
        follower, _ = world.push(0, 2, 4, token=2, worker="other")

        with pytest.raises(Fenced):
            world.sender.push(header, 0, payload)

        world.shard().turn()
        assert [world.fate(each) for each in (header, follower)] == ["applied"] * 2
        assert world.rejected() == {}
        assert not world.tensor_keys("u:")

    @pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 4), (3, 4)])
    def test_out_of_place_it_is_refused_with_its_payload(
        self, world: World, start: int, stop: int
    ) -> None:
        world.push(0, 0, 2)
        before = world.tensor_keys("u:")

        _, pushed = world.push(0, start, stop)

        assert pushed == PushResult(accepted=False, position=2)
        assert world.tensor_keys("u:") == before
        assert world.reader.waiting() == 1

    @pytest.mark.parametrize("lost", ["u:", "push-slots"])
    def test_a_push_that_lost_its_payload_or_its_slot_is_tried_again(
        self, world: World, monkeypatch: pytest.MonkeyPatch, lost: str
    ) -> None:
        header, payload = world.update(0, 0, 3, 1)
        script = world.sender._push

        def lose_first(**arguments: Any) -> Any:
            found = world.tensor_keys(lost)
            world.tensors.delete(*(world.keys.prefix + key for key in found))
            return script(**arguments)

        monkeypatch.setattr(world.sender, "_push", lose_first)
        with pytest.raises(StoreUnavailable, match="lost a part of a pushed update"):
            world.sender.push(header, 0, payload, AFTER)
        monkeypatch.undo()

        assert world.reader.waiting() == 0
        assert world.sender.push(header, 0, payload).accepted
        assert world.reader.waiting() == 1

    def test_a_payload_of_one_chunk_is_sent_before_the_slot_is_given(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        header, payload = world.update(0, 0, 3, 1)
        # Given a server without the scripts, then one with them
        world.tensors.script_flush()
        assert world.sender.push(header, 0, payload).accepted
        monkeypatch.setattr(world.sender, "_take_slot", None)

        header, payload = world.update(1, 0, 3, 1)
        assert world.sender.push(header, 0, payload).accepted
        again = world.sender.push(header, 0, payload)

        assert again.accepted
        assert world.reader.waiting() == 2
        assert world.receive(header, len(payload)) == bytes(payload)
        assert world.tensors.ttl(world.keys.payload_chunk(header.update, 0)) == -1
        assert world.tensors.zscore(world.keys.push_slots, header.update) == float("inf")

    def test_a_payload_of_one_chunk_without_a_slot_does_not_stay(self, world: World) -> None:
        """Those of many workers would leave no room for the next version."""
        world.tensors.set(world.keys.window, 1)
        world.push(0, 0, 3)
        header, payload = world.update(1, 0, 3, 1)

        for _ in range(2):
            with pytest.raises(StoreFull, match="all push slots are taken"):
                world.sender.push(header, 0, payload)
            assert len(world.tensor_keys("u:")) == world.reader.waiting() == 1

        world.tensors.delete(world.keys.window)
        assert world.sender.push(header, 0, payload).accepted
        assert len(world.tensor_keys("u:")) == world.reader.waiting() == 2

    def test_payloads_of_more_chunks_than_lua_can_unpack(
        self, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A script can unpack fewer than 8,000 values; a shard of 8.4 GB has more chunks."""
        # Given a model, and chunks so small that it has as many of them as one of 8.6 GB
        monkeypatch.setattr(chunks, "CHUNK_BYTES", 16)
        world = make_world(samples=MAX_UNPACKED * 4)
        # When one worker loses its connection before the entry, and another one pushes
        lost, payload = world.update(1, 0, 4, 1)
        assert chunk_count(len(payload)) > MAX_UNPACKED
        interrupt_push(world, lost, payload)
        _, pushed = world.push(0, 0, 4)
        assert pushed.accepted
        # Then its update is applied, and nothing stays of the other payload
        world.shard().turn()
        world.assert_exact()
        world.tensors.zadd(world.keys.push_slots, {lost.update: 1})
        assert PushSlots(world.tensors, world.keys).reap(chunk_count(len(payload))) == 1
        assert not world.tensor_keys("u:")

    def test_a_payload_without_an_entry_vanishes_and_one_with_an_entry_stays(
        self, world: World
    ) -> None:
        """Payloads are kept while the parameter server is unavailable."""
        header, payload = world.update(0, 0, 3, 1)

        interrupt_push(world, header, payload)
        key = world.keys.payload_chunk(header.update, 0)
        assert 0 < world.tensors.ttl(key) <= PAYLOAD_SECONDS

        world.sender.push(header, 0, payload)
        assert world.tensors.ttl(key) == -1
        world.sender.push(header, 0, payload)  # an answer was lost
        assert world.tensors.ttl(key) == -1


class TestStatus:
    def test_many_at_once_with_the_version_and_its_writer(self, world: World) -> None:
        applied, _ = world.push(0, 0, 4)
        world.shard(token=9).turn()
        waiting, _ = world.push(1, 0, 4)

        status = world.sender.status(
            [(0, 0, 4, applied.update), (1, 0, 4, waiting.update), (2, 0, 4, "never")]
        )

        assert status.version == (1, 9)
        assert status.outcomes == ["applied", "pending", "lost"]
        assert world.sender.status([]).outcomes == []

    def test_the_status_after_a_commit_brings_a_small_snapshot(self, world: World) -> None:
        shard = world.started_shard()
        header, _ = world.push(0, 0, 3)
        shard.turn()
        asked = [(0, 0, 3, header.update)]

        seen, status = world.sender.status_after_commit(5.0, NO_COMMIT, asked, (0, 0), "0")
        nothing, same = world.sender.status_after_commit(
            0.01, seen, asked, status.version, ONLY_CHUNK
        )
        other = world.sender.status(asked, (0, 0), "h0")

        assert status.outcomes == ["applied"]
        assert status.meta is not None
        expected, out = world.vector(), torch.empty(world.layout.floats)
        world.tensors.delete(*world.snapshots.chunk_keys(status.meta))
        assert world.snapshots.fetch_rounded(out, status.meta, status.content) == status.meta
        assert torch.equal(out, expected)
        assert (nothing, same.meta, same.content) == (seen, None, b"")
        assert (other.meta, other.content) == (status.meta, b"")

    def test_the_status_after_a_commit_loads_its_script(self, world: World) -> None:
        world.tensors.script_flush()

        _, status = world.sender.status_after_commit(0.01, NO_COMMIT, [])

        assert status.outcomes == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda world, key: world.tensors.delete(key), "missing"),
        (lambda world, key: world.tensors.append(key, b"x"), "length"),
        (lambda world, key: world.tensors.set(key, b""), "length"),
        (lambda world, key: world.tensors.setrange(key, 5, b"\xff"), "checksum"),
    ],
    ids=["missing", "longer", "empty", "another byte"],
)
@pytest.mark.parametrize("chunk", [0, 1])
def test_damage_of_a_payload_is_found(
    world: World, damage: Callable[[World, str], object], reason: str, chunk: int
) -> None:
    payload = bytes(CHUNK_BYTES + 100)
    header, _ = world.push(0, 0, 3, payload=payload)
    damage(world, world.keys.payload_chunk(header.update, chunk))

    with pytest.raises(InvalidUpdate) as caught:
        world.receive(header, len(payload))

    assert caught.value.reason == reason


def test_a_reader_waits_for_the_first_entry(world: World) -> None:
    stream = {world.keys.stream: "0-0"}
    before = world.tensors.time()
    wait_for_entries(world.tensors, stream, 0.05)
    after = world.tensors.time()
    assert (after[0] - before[0]) * 1e6 + after[1] - before[1] >= 50_000

    world.push(0, 0, 3)

    wait_for_entries(world.tensors, stream, 60)  # returns at once
