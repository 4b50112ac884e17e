"""The parameter server's shard on a real server."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.harness import RedisServer
from support.servers import Fault, through_proxy
from support.world import HonestWorker, World, run_to_end
from torch import Tensor

from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StorageUnavailable,
    StoreFull,
    StoreUnavailable,
)
from vcasgd.parameter_server import publish
from vcasgd.parameter_server.model_state import MOST_UPDATES
from vcasgd.parameter_server.reports import REJECTIONS_BEFORE_QUARANTINE
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.snapshot import Change, encode_integers
from vcasgd.store.tensors.snapshot_store import MOST_PINS
from vcasgd.store.tensors.updates import LONGEST_HEADER

MakeWorld = Callable[..., World]
VC_ASGD = {"rule": "vc-asgd", "alpha": 0.75}


# --- what is applied --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
class TestApplies:
    def test_a_difference_is_added(self, make_world: MakeWorld, codec: str) -> None:
        world = make_world(update={"rule": "async-local-sgd", "eta": 0.5, "codec": codec})
        delta = torch.linspace(-1, 1, world.layout.floats).bfloat16().float()

        world.push(0, 0, 2, vector=delta)
        assert world.shard().turn() == 1

        # Running statistics are averaged, never summed.
        expected = torch.cat([0.5 * delta[:-1], torch.lerp(torch.zeros(1), delta[-1:], 0.5)])
        assert torch.equal(world.vector(), expected)
        world_snapshot = world.snapshots.read()
        assert world_snapshot.record.positions == {0: 2}
        assert world_snapshot.meta.version == 1

    def test_weights_are_blended(self, make_world: MakeWorld, codec: str) -> None:
        world = make_world(update={**VC_ASGD, "codec": codec})
        local = torch.linspace(-1, 1, world.layout.floats).bfloat16().float()

        world.push(0, 0, 2, vector=local)
        world.push(1, 0, 2, vector=local, base=1)
        world.shard().turn()

        expected = torch.lerp(torch.lerp(torch.zeros(1), local, 0.25), local, 0.25)
        assert torch.equal(world.vector(), expected)

    def test_a_whole_job(self, make_world: MakeWorld, codec: str) -> None:
        world = make_world(update={"rule": "async-local-sgd", "eta": 1.0, "codec": codec})
        shard = world.shard()

        run_to_end(
            world, [HonestWorker(world, "a"), HonestWorker(world, "b", interval=3)], shard.turn
        )

        assert shard.turn() == 0
        evaluated = [each.epoch for each in world.jobs.get(world.job).evaluations]
        assert evaluated in ([1], [1, 2]), "the last one may still be open"
        totals = world.jobs.get(world.job).totals
        assert (totals["samples"], totals["applied"], totals["repeated"]) == (24, 24, 0)


class TestInt8:
    def test_differences_are_rounded_and_statistics_are_not(self, make_world: MakeWorld) -> None:
        world = make_world(update={"rule": "async-local-sgd", "eta": 1.0, "codec": "int8"})
        delta = torch.tensor([127.0, -63.4, *[0.0] * 10, 1e-6])

        world.push(0, 0, 2, vector=delta)
        assert world.shard().turn() == 1

        assert world.vector().tolist() == [127.0, -63.0, *[0.0] * 10, (delta[-1] / 2).item()]

    def test_a_whole_job(self, make_world: MakeWorld) -> None:
        world = make_world(update={"rule": "async-local-sgd", "eta": 1.0, "codec": "int8"})
        shard = world.shard()

        run_to_end(
            world, [HonestWorker(world, "a"), HonestWorker(world, "b", interval=3)], shard.turn
        )

        assert world.complete
        world.assert_exact()

    @pytest.mark.parametrize("codec", ["topk", "partition"])
    def test_a_whole_job_in_one_block(self, make_world: MakeWorld, codec: str) -> None:
        world = make_world(update={"rule": "async-local-sgd", "eta": 1.0, "codec": codec})

        run_to_end(world, [HonestWorker(world, "a"), HonestWorker(world, "b")], world.shard().turn)

        world.assert_exact()

    @pytest.mark.parametrize("codec", ["int8", "topk", "partition"])
    def test_the_last_update_of_a_worker_carries_what_was_kept_back(
        self, make_world: MakeWorld, codec: str
    ) -> None:
        # Given a worker whose first update leaves a residual under each encoding
        world = make_world(
            samples=3000, update={"rule": "async-local-sgd", "eta": 1.0, "codec": codec}
        )
        shard, encoder, total = world.shard(), world.encoder(), torch.zeros(3001)
        for nth, last in enumerate((False, True)):
            delta = torch.randn(3001, generator=torch.Generator().manual_seed(nth))
            delta[-1] = 0.0
            total += delta

            # When it pushes twice, and the second is its last
            encoded = encoder.encode(delta, last=last)
            payload = b"".join(encoded.chunks(1 << 20))
            header, _ = world.push(0, nth, nth + 1, payload=payload, codec=encoded.codec)
            assert shard.turn() == 1
            assert world.fate(header) == "applied"
            exact = torch.allclose(world.vector(), total, rtol=1e-5, atol=1e-5)

            # Then both are completely in the model
            assert exact is last

    @pytest.mark.parametrize("at", [0, 256])
    def test_numbers_that_are_none_are_refused(self, make_world: MakeWorld, at: int) -> None:
        world = make_world(update={"rule": "async-local-sgd", "codec": "int8"})
        payload = bytearray(260)
        payload[at : at + 4] = struct.pack("<f", math.nan)

        header, _ = world.push(0, 0, 2, payload=bytes(payload))
        world.shard().turn()

        assert world.fate(header) == "rejected:non-finite"
        assert not world.vector().any()


class TestRows:
    ROWS: ClassVar = {"update": {"rule": "async-local-sgd", "eta": 1.0, "codec": "rows"}}

    def test_a_whole_job(self, make_world: MakeWorld) -> None:
        world = make_world(samples=600, table=True, **self.ROWS)
        workers = [HonestWorker(world, "a", interval=50), HonestWorker(world, "b", interval=70)]

        run_to_end(world, workers, world.shard().turn)

        assert world.complete
        world.assert_exact()

    def test_only_what_changed_is_sent(self, make_world: MakeWorld) -> None:
        world = make_world(samples=600, table=True, **self.ROWS)

        header, _ = world.push(0, 0, 5)
        world.shard().turn()

        # The number of rows, the statistic, and five rows of one number.
        assert header.size == 4 * (1 + 1 + 5 * (1 + 1))
        assert world.counts() == world.expected_counts(world.snapshots.read().record)

    def test_rows_that_can_not_be_are_refused(self, make_world: MakeWorld) -> None:
        world = make_world(samples=600, table=True, **self.ROWS)
        payload = struct.pack("<3I3f", 2, 7, 7, 0.0, 1.0, 1.0)

        header, _ = world.push(0, 0, 5, payload=payload)
        world.shard().turn()

        assert world.fate(header) == "rejected:rows"
        assert not world.vector().any()


class TestBatches:
    def test_one_publication_for_all_that_wait(self, make_world: MakeWorld) -> None:
        world = make_world(samples=60, subtasks_per_epoch=30)
        for subtask in range(20):
            world.push(subtask, 0, 1)

        assert world.shard().turn() == 20

        assert world.snapshots.version() == 20
        assert {key for key in world.tensor_keys() if key.startswith("s:")} == {
            "s:0.0:0", "s:20.1:0",
        }  # fmt: skip
        world.assert_exact()

    def test_a_batch_is_bounded(self, make_world: MakeWorld) -> None:
        world = make_world(samples=60, subtasks_per_epoch=60)
        for subtask in range(MOST_UPDATES + 5):
            world.push(subtask, 0, 1)
        shard = world.shard()

        assert [shard.turn(), shard.turn(), shard.turn()] == [MOST_UPDATES, 5, 0]
        world.assert_exact()

    def test_the_end_of_an_epoch_gets_a_version_of_its_own(self, world: World) -> None:
        """It is then evaluated exactly, although updates of the next epoch wait."""
        for subtask in (3, 0, 1, 2, 4):
            world.push(subtask, 0, 4)
        shard = world.shard()

        assert shard.turn() == 4
        assert shard.turn() == 1

        pinned, floats = world.snapshots.fetch_pinned("epoch-1")
        assert pinned.record.finished == 1
        assert pinned.record.positions == {3: 4}
        assert floats[: world.plan.samples].tolist() == world.expected_counts(pinned.record)
        world.assert_exact()

    def test_staleness_is_counted_update_by_update(self, world: World) -> None:
        world.push(0, 0, 1, base=0)
        world.push(0, 1, 2, base=0)
        world.push(0, 2, 3, base=2)
        world.push(0, 3, 4, base=1000)  # a version that was lost
        world.shard().turn()

        totals = world.snapshots.read().meta.totals
        assert (totals.updates, totals.samples) == (4, 4)
        assert (totals.staleness_sum, totals.staleness_max) == (0 + 1 + 0 + 0, 1)
        assert totals.loss_sum == 4.0

    def test_counters_never_run_backwards(self, world: World) -> None:
        world.push(0, 0, 1, integers=encode_integers(torch.tensor([7])))
        world.push(1, 0, 1, integers=encode_integers(torch.tensor([5])))
        world.shard().turn()

        assert world.snapshots.read().meta.integer_vector().tolist() == [7]


class TestTellsTheLedger:
    def test_progress_totals_and_finished_work(self, world: World) -> None:
        leases = world.leases("a")
        for _ in range(4):
            assert isinstance(leases.acquire(), Lease)
        for subtask in range(3):
            world.push(subtask, 0, 4)
        world.push(3, 0, 2)

        shard = world.shard()
        shard.turn()
        shard.turn()

        job = world.jobs.get(world.job)
        assert (job.version, job.finished_epochs) == (4, 1)
        assert (job.totals["updates"], job.totals["samples"]) == (4, 14)
        assert list(world.partition().leased) == [3]
        world.partition().assert_whole()

    def test_points_of_the_metrics_are_a_second_apart(self, world: World) -> None:
        shard = world.shard()
        shard.turn()
        world.push(0, 0, 2)
        shard.turn()
        assert world.jobs.metrics(world.job) == []

        world.now += 2
        world.push(0, 2, 4, base=0)
        shard.turn()
        world.now += 5
        shard.turn()  # no updates, so no new point

        (point,) = world.jobs.metrics(world.job)
        assert (point["at"], point["version"], point["samples"]) == (world.now - 5, 2, 4)
        assert (point["updates_per_second"], point["samples_per_second"]) == (1.0, 2.0)
        assert (point["loss"], point["staleness_mean"]) == (1.0, 0.5)
        assert point["waiting"] == 0

    def test_a_ledger_that_is_away_stops_no_training(
        self, world: World, server: RedisServer
    ) -> None:
        fault = Fault(at=1)
        with through_proxy(server, 0, fault) as ledger:
            shard = world.shard(ledger=ledger)
            shard.turn()
            for position in range(3):
                world.push(0, position, position + 1)
                fault.arm()
                with pytest.raises(StoreUnavailable):
                    shard.turn()
                assert world.snapshots.version() == position + 1
            shard.turn()

        assert world.jobs.get(world.job).version == 3


# --- what is rejected -------------------------------------------------------------------------

MODEL = "f" * 64


def of(**changes: Any) -> Callable[[World], tuple[Any, bytes]]:
    """An update [0, 2) of subtask 1 that differs from an honest one in some way."""

    def make(world: World) -> tuple[Any, bytes]:
        place = {"subtask": 1, "start": 0, "stop": 2, "token": 1}
        header, payload = world.update(**{**place, **changes})
        return header, bytes(payload)

    return make


def with_payload(change: Callable[[bytes], bytes]) -> Callable[[World], tuple[Any, bytes]]:
    """Return an update whose payload was changed after its header was made."""

    def make(world: World) -> tuple[Any, bytes]:
        header, payload = of()(world)
        return header, change(payload)

    return make


def holding(value: float) -> Callable[[World], tuple[Any, bytes]]:
    def make(world: World) -> tuple[Any, bytes]:
        vector = world.delta(1, 0, 2)
        vector[-1] = value
        return of(vector=vector)(world)

    return make


REJECTED: list[tuple[str, str, Callable[[World], tuple[Any, bytes]]]] = [
    ("layout", "another model", of(layout=MODEL)),
    ("codec", "another encoding", of(codec="bfloat16")),
    ("length", "a shorter vector", of(payload=bytes(8))),
    ("length", "a longer vector", of(payload=bytes(4000))),
    ("length", "a size that lies", of(size=1 << 50)),
    ("length", "cut off in transit", with_payload(lambda payload: payload[:-4])),
    ("checksum", "a wrong checksum", of(checksum=1)),
    ("checksum", "a flipped bit", with_payload(lambda payload: b"\x01" + payload[1:])),
    ("missing", "no payload at all", with_payload(lambda _: b"")),
    ("non-finite", "a NaN", holding(math.nan)),
    ("non-finite", "a value that would overflow the weights", holding(3e38)),
    ("non-finite", "an infinity", holding(-math.inf)),
    ("duplicate", "samples that are applied", of(subtask=0)),
    ("out-of-place", "samples behind a gap", of(start=1)),
    ("range", "a subtask that does not exist", of(subtask=6)),
    ("range", "samples that do not exist", of(stop=5)),
    ("range", "no samples", of(stop=0)),
    ("range", "samples in reverse", of(start=2, stop=1)),
    ("integers", "too many counters", of(integers=encode_integers(torch.zeros(2).long()))),
    ("integers", "half a counter", of(integers="AAAA")),
    ("integers", "not base64", of(integers="%%%%")),
]


class TestRejects:
    @pytest.fixture
    def world(self, make_world: MakeWorld) -> World:
        """A job with samples [0, 2) of subtask 0 applied."""
        world = make_world()
        world.push(0, 0, 2)
        world.shard(token=1).turn()
        return world

    @pytest.mark.parametrize(
        ("reason", "make"),
        [pytest.param(reason, make, id=f"{reason}: {why}") for reason, why, make in REJECTED],
    )
    def test_without_changing_a_byte(
        self, world: World, reason: str, make: Callable[[World], tuple[Any, bytes]]
    ) -> None:
        shard = world.shard(token=2)
        shard.turn()
        before, weights = world.snapshots.read(), world.vector().numpy().tobytes()
        header, payload = make(world)
        world.inject(header, payload)

        assert shard.turn() == 1

        after = world.snapshots.read()
        assert world.vector().numpy().tobytes() == weights
        assert after.record == before.record
        assert after.meta.version == before.meta.version
        assert after.meta.integers == before.meta.integers
        assert after.meta.totals.rejected == {reason: 1}
        assert after.meta.totals.samples == before.meta.totals.samples
        assert world.fate(header) == f"rejected:{reason}"
        assert world.jobs.get(world.job).totals["rejected"] == {reason: 1}
        assert world.reader.waiting() == 0
        assert not any(key.startswith("u:") for key in world.tensor_keys()), "payload deleted"

    @pytest.mark.parametrize(
        "text",
        [b"", b"garbage", b"{}", b"\xff" * 100, b"[" * 50_000, b" " * (LONGEST_HEADER + 1)],
        ids=["empty", "words", "no fields", "no text", "deep", "long"],
    )
    def test_headers_that_are_none(self, world: World, text: bytes) -> None:
        shard = world.shard(token=2)
        shard.turn()
        weights = world.vector().numpy().tobytes()
        world.tensors.xadd(world.keys.stream, {"h": text})

        assert shard.turn() == 1
        assert shard.turn() == 0

        assert world.vector().numpy().tobytes() == weights
        assert world.rejected() == {"header": 1}
        assert world.reader.waiting() == 0

    def test_an_honest_update_behind_it_is_applied_all_the_same(self, world: World) -> None:
        for reason, _, make in REJECTED:
            header, payload = make(world)
            world.inject(header, payload)
            assert reason
        world.push(0, 2, 4)
        world.push(2, 0, 4)
        shard = world.shard(token=2)

        assert shard.turn() == len(REJECTED) + 2

        world.assert_exact()
        assert world.snapshots.read().record.positions == {0: 4, 2: 4}
        assert sum(world.rejected().values()) == len(REJECTED)

    def test_the_worker_that_was_rejected_does_it_again(self, world: World) -> None:
        """Its samples are open again, and its later updates are not applied."""
        shard = world.shard(token=2)
        shard.turn()
        world.push(0, 2, 3, checksum=1)
        follower, _ = world.push(0, 3, 4)
        shard.turn()
        assert world.fate(follower) == "rejected:out-of-place"
        assert world.sender.begin(0, 0, 4, 1) == 2

        world.push(0, 2, 4)
        shard.turn()

        assert world.snapshots.read().record.positions == {0: 4}
        world.assert_exact()

    def test_a_late_duplicate_of_a_finished_epoch_leaves_nothing(self, world: World) -> None:
        shard = world.shard(token=2)
        duplicate, payload = world.update(1, 0, 4, 1)
        world.push(0, 2, 4)
        world.push(1, 0, 4)
        world.push(2, 0, 4)
        shard.turn()
        world.inject(duplicate, bytes(payload))
        shard.turn()

        assert world.rejected() == {"duplicate": 1}
        assert world.tensors.hkeys(world.keys.pushed) == []
        world.assert_exact()

    def test_after_several_in_a_row_the_worker_gets_no_more_work(self, world: World) -> None:
        shard = world.shard(token=2)
        shard.turn()
        for number in range(REJECTIONS_BEFORE_QUARANTINE):
            assert world.jobs.quarantined(world.job) == {}, f"after {number}"
            world.push(1, 0, 2, checksum=1, worker="bad")
            world.push(2, 0, 2, checksum=1, worker=f"good-{number}")
            shard.turn()

        assert world.jobs.quarantined(world.job).keys() == {"bad"}
        assert "checksum" in world.jobs.quarantined(world.job)["bad"]
        (event,) = world.events("worker-quarantined")
        assert event["details"]["worker"] == "bad"
        assert not isinstance(world.leases("bad").acquire(), Lease)
        assert len(world.events("update-rejected")) == 2 * REJECTIONS_BEFORE_QUARANTINE

    def test_an_applied_update_clears_the_worker(self, world: World) -> None:
        shard = world.shard(token=2)
        shard.turn()
        for _ in range(REJECTIONS_BEFORE_QUARANTINE - 1):
            world.push(1, 0, 1, checksum=1)
            shard.turn()
        world.push(1, 0, 1)
        for _ in range(REJECTIONS_BEFORE_QUARANTINE - 1):
            world.push(2, 0, 1, checksum=1)
            shard.turn()

        assert world.jobs.quarantined(world.job) == {}

    def test_being_late_is_no_fault(self, world: World) -> None:
        shard = world.shard(token=2)
        shard.turn()
        for _ in range(2 * REJECTIONS_BEFORE_QUARANTINE):
            for start in (0, 3):
                header, payload = world.update(0, start, start + 1, 1, worker="late")
                world.inject(header, bytes(payload))
            shard.turn()

        assert world.rejected() == {"duplicate": 10, "out-of-place": 10}
        assert world.jobs.quarantined(world.job) == {}
        assert world.events("update-rejected") == []

    def test_sums_stay_finite_whatever_a_worker_claims(self, world: World) -> None:
        shard = world.shard(token=2)
        shard.turn()
        for start in (0, 1, 2, 3):
            world.push(1, start, start + 1, loss_sum=1e200)
        world.now += 10
        shard.turn()

        json.dumps(world.jobs.get(world.job).totals, allow_nan=False)
        json.dumps(world.jobs.metrics(world.job), allow_nan=False)


# --- pins -------------------------------------------------------------------------------------


class TestPins:
    def chunks(self, world: World) -> set[str]:
        return {key for key in world.tensor_keys() if key.startswith("s:")}

    def test_wanted_ones_are_kept_while_training_goes_on(self, world: World) -> None:
        shard = world.shard(token=1)
        world.push(0, 0, 1)
        shard.turn()
        world.snapshots.request_pin("periodic")
        shard.turn()
        for position in (1, 2, 3):
            world.push(0, position, position + 1)
            shard.turn()

        snapshot, floats = world.snapshots.fetch_pinned("periodic")

        assert snapshot.meta.version == 1
        assert floats[:-1].tolist() == world.expected_counts(snapshot.record)
        assert self.chunks(world) == {"s:1.1:0", "s:3.1:0", "s:4.1:0"}

        world.snapshots.unpin("periodic")
        shard.turn()
        assert self.chunks(world) == {"s:3.1:0", "s:4.1:0"}

    def test_one_that_is_wanted_again_while_it_is_kept_leaks_nothing(self, world: World) -> None:
        shard = world.shard(token=1)
        shard.turn()
        for position in range(4):
            world.snapshots.request_pin("periodic")
            shard.turn()
            world.push(0, position, position + 1)
            shard.turn()
        assert world.snapshots.fetch_pinned("periodic")[0].meta.version == 0

        world.snapshots.unpin("periodic")
        shard.turn()

        assert self.chunks(world) == {"s:3.1:0", "s:4.1:0"}

    def test_the_present_one_outlives_its_pin(self, world: World) -> None:
        shard = world.shard()
        world.push(0, 0, 1)
        shard.turn()
        world.snapshots.request_pin("periodic")
        shard.turn()
        world.push(1, 0, 1, checksum=1)  # changes the totals, not the version
        shard.turn()

        world.snapshots.unpin("periodic")
        shard.turn()

        world.assert_exact()

    def test_the_previous_one_outlives_its_pin(self, world: World) -> None:
        """A worker may still be reading it."""
        shard = world.shard(token=1)
        shard.turn()
        world.snapshots.request_pin("periodic")
        shard.turn()
        world.push(0, 0, 1)
        shard.turn()

        world.snapshots.unpin("periodic")
        shard.turn()

        assert self.chunks(world) == {"s:0.0:0", "s:1.1:0"}
        world.push(0, 1, 2)
        shard.turn()
        assert self.chunks(world) == {"s:1.1:0", "s:2.1:0"}

    def test_two_names_for_one(self, world: World) -> None:
        shard = world.shard()
        shard.turn()
        for name in "ab":
            world.snapshots.request_pin(name)
        shard.turn()
        for position in range(3):
            world.push(0, position, position + 1)
            shard.turn()

        world.snapshots.unpin("a")
        shard.turn()

        assert world.snapshots.fetch_pinned("b")[0].meta.version == 0

    def test_there_are_never_too_many(self, world: World) -> None:
        shard = world.shard()
        shard.turn()
        for name in "abcdef":
            world.snapshots.request_pin(name)
        shard.turn()
        assert world.snapshots.view().pins == set("abcd"[:MOST_PINS])

        world.snapshots.unpin("a")
        shard.turn()

        assert world.snapshots.view().pins == set("bcde")
        assert world.snapshots.view().wanted == ("f",)

    def test_an_epoch_that_finds_no_room_is_published_unpinned(self, world: World) -> None:
        shard = world.shard()
        shard.turn()
        for name in "abcd":
            world.snapshots.request_pin(name)
        shard.turn()
        for subtask in range(3):
            world.push(subtask, 0, 4)
        shard.turn()

        assert world.snapshots.read().record.finished == 1
        assert world.snapshots.view().pins == set("abcd")

    def test_a_new_server_knows_them(self, world: World) -> None:
        first = world.shard(token=1)
        first.turn()
        world.snapshots.request_pin("a")
        first.turn()
        second = world.shard(token=2)
        for position in (0, 1, 2):
            world.push(0, position, position + 1)
            second.turn()
        assert world.snapshots.fetch_pinned("a")[0].meta.version == 0

        world.snapshots.unpin("a")
        second.turn()

        assert self.chunks(world) == {"s:2.2:0", "s:3.2:0"}


# --- coming back ------------------------------------------------------------------------------


class TestTakesOver:
    def test_it_goes_on_with_what_waits(self, world: World) -> None:
        world.push(0, 0, 2)
        world.shard().turn()
        world.push(0, 2, 4)  # no parameter server is running

        world.shard().turn()

        assert world.snapshots.read().record.positions == {0: 4}
        world.assert_exact()

    def test_the_one_before_is_fenced_as_soon_as_it_writes(self, world: World) -> None:
        old = world.shard(token=1)
        old.turn()
        new = world.shard(token=2)
        new.turn()
        world.push(0, 0, 2)

        with pytest.raises(Fenced, match="token 2"):
            old.turn()

        assert world.snapshots.version() == 0
        assert new.turn() == 1
        world.assert_exact()

    def test_the_one_before_is_fenced_when_it_sees_a_foreign_version(self, world: World) -> None:
        old = world.shard(token=1)
        old.turn()
        new = world.shard(token=2)
        world.push(0, 0, 2)
        new.turn()

        with pytest.raises(Fenced, match="was not written by this server"):
            old.turn()

    def test_a_late_comer_with_an_old_token_never_starts(self, world: World) -> None:
        world.shard(token=2).turn()

        with pytest.raises(Fenced):
            world.shard(token=1).turn()

    def test_what_an_interrupted_publication_left_is_removed(self, world: World) -> None:
        shard = world.shard(token=1)
        shard.turn()
        meta = world.snapshots.read().meta
        world.snapshots.write(
            type(meta)(5, 1, meta.floats, meta.parameters, meta.layout),
            torch.zeros(meta.floats),
        )

        world.shard(token=2).turn()

        assert {key for key in world.tensor_keys() if key.startswith("s:")} == {"s:0.0:0"}

    def test_the_ledger_is_made_right(self, world: World) -> None:
        """The previous server published, and died before its report to the ledger."""
        assert isinstance(world.leases("a").acquire(), Lease)
        world.push(0, 0, 4)
        shard = world.shard(token=1)
        shard._report = lambda _model: None  # type: ignore[method-assign]
        shard.turn()
        assert list(world.partition().leased) == [0]

        world.shard(token=2).turn()

        assert list(world.partition().done) == [0]
        world.partition().assert_whole()


class TestTensorsServerComesBackEmpty:
    def test_published_again_and_pushed_again(self, world: World) -> None:
        shard = world.shard()
        worker = HonestWorker(world, "a")
        worker.step()
        shard.turn()
        worker.step()
        assert worker.unapplied
        world.lose_tensors()
        worker.step()  # finds no snapshot, and keeps its update

        shard.turn()

        world.assert_exact()
        run_to_end(world, [worker], shard.turn)
        (event,) = world.events("republished")
        assert event["details"]["version"] == 2
        assert "lost" in worker.settled
        assert world.rejected() == {}

    def test_what_was_claimed_but_not_published_is_not_lost(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is in the parameter server's memory, which is published again."""
        shard = world.shard()
        shard.turn()
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

        assert world.snapshots.read().record.positions == {0: 4}
        world.assert_exact()
        assert world.jobs.get(world.job).version == 1
        assert list(world.partition().done) == [0]

    def test_pins_are_gone_and_can_be_wanted_again(self, world: World) -> None:
        shard = world.shard()
        shard.turn()
        world.snapshots.request_pin("a")
        shard.turn()
        world.lose_tensors()
        shard.turn()
        assert world.snapshots.view().pins == set()

        world.snapshots.request_pin("a")
        shard.turn()

        assert world.snapshots.fetch_pinned("a")[0].meta.version == 0

    @pytest.mark.parametrize("first", ["old", "new"])
    def test_a_zombie_does_not_bring_back_the_past(self, world: World, first: str) -> None:
        """The fence was lost with the server, but the ledger has the newest token."""
        old = world.shard(token=1)
        old.turn()
        new = world.shard(token=2)
        world.push(0, 0, 4)
        new.turn()
        world.lose_tensors()

        if first == "new":
            new.turn()
        with pytest.raises(Fenced):
            old.turn()
        new.turn()

        world.assert_exact()
        assert world.snapshots.read().record.positions == {0: 4}

    def test_an_old_memory_of_the_same_version_is_not_taken_for_the_own(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the ledger, a fenced server may publish an update that it could not commit."""
        old = world.shard(token=1)
        old.turn()
        lost, _ = world.push(0, 0, 2)
        with monkeypatch.context() as patch:
            patch.setattr(old._snapshots, "commit", _never)
            with pytest.raises(StoreUnavailable):
                old.turn()
        world.tensors.delete(world.keys.payload_chunk(lost.update, 0))
        new = world.shard(token=2)
        new.turn()
        world.push(1, 0, 2)
        new.turn()
        assert world.snapshots.read().record.positions == {1: 2}
        world.lose_tensors()
        monkeypatch.setattr(old._recovery, "_check_newest", lambda: None)
        old.turn()
        assert world.snapshots.read().record.positions == {0: 2}
        world.push(2, 0, 2)

        with pytest.raises(Fenced, match="was not written by this server"):
            new.turn()

        world.shard(token=3).turn()
        assert world.snapshots.read().record.positions == {0: 2, 2: 2}
        world.assert_exact()


def _never(*_args: object) -> None:
    raise StoreUnavailable("frozen")


class TestBothAreLost:
    def test_back_to_the_checkpoint_and_its_record(self, world: World) -> None:
        worker = HonestWorker(world, "a")
        first = world.shard()
        worker.step()
        first.turn()
        stored = world.checkpoint()
        kept = world.snapshots.read()
        for _ in range(3):
            worker.step()
            first.turn()
        assert world.snapshots.version() > kept.meta.version
        world.lose_tensors()

        second = world.shard()
        second.turn()

        assert world.snapshots.read().record == kept.record
        world.assert_exact()
        world.partition().assert_whole()
        (event,) = world.events("restored")
        assert stored.name in event["text"]
        run_to_end(world, [worker, HonestWorker(world, "b")], second.turn)

    def test_a_damaged_checkpoint_is_passed_over_with_an_event(
        self, world: World, tmp_path: Path
    ) -> None:
        shard = world.shard()
        world.push(0, 0, 2)
        shard.turn()
        whole = world.checkpoint()
        world.push(0, 2, 4)
        shard.turn()
        damaged = world.checkpoint()
        path = tmp_path / "storage" / "jobs" / world.job / "checkpoints" / damaged.name
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        world.lose_tensors()

        world.shard().turn()

        assert world.snapshots.read().record.positions == {0: 2}
        world.assert_exact()
        (event,) = world.events("checkpoint-damaged")
        assert damaged.name in event["text"]
        assert whole.name in world.events("restored")[0]["text"]

    def test_without_a_checkpoint_the_model_is_made_again(self, world: World) -> None:
        shard = world.shard()
        worker = HonestWorker(world, "a")
        worker.step()
        shard.turn()
        world.lose_tensors()
        second = world.shard()

        for _ in range(3):
            assert second.turn() == 0

        assert len(world.events("restarted")) == 1
        world.expire()
        run_to_end(world, [HonestWorker(world, "b")], second.turn)

    def test_a_storage_that_is_away_is_asked_again(
        self, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shard = world.shard()
        world.push(0, 0, 2)
        shard.turn()
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

        assert world.snapshots.read().record.positions == {0: 2}
        assert world.events("restarted") == [], "a failed request is not an empty storage"


def test_a_full_tensors_server_stops_nothing_for_good(world: World) -> None:
    shard = world.shard()
    shard.turn()
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

    assert world.snapshots.read().record.positions == {0: 4}
    world.assert_exact()


class TestRounded:
    """With bfloat16, workers fetch the high halves, and the low halves follow later."""

    @pytest.fixture
    def halves(self, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> World:
        """A job whose first publication is exact, and no later one has to be."""
        monkeypatch.setattr(publish, "EXACT_SECONDS", math.inf)
        return make_world(update={"rule": "vc-asgd", "alpha": 0.7, "codec": "bfloat16"})

    @staticmethod
    def publish(world: World, shard: Shard, subtask: int) -> Tensor:
        """Publish weights that bfloat16 can't represent, and return the exact ones."""
        world.push(subtask, 0, 2, vector=torch.randn(world.layout.floats), base=subtask)
        assert shard.turn() == 1
        assert shard._model is not None
        weights = shard._model.weights.clone()
        assert not torch.equal(weights, weights.bfloat16().float())
        return weights

    def begin(self, world: World) -> tuple[Shard, Tensor]:
        shard = world.shard(1)
        shard.turn()
        self.publish(world, shard, 0)
        return shard, self.publish(world, shard, 1)

    def test_a_publication_that_follows_soon_is_rounded(self, halves: World) -> None:
        _, weights = self.begin(halves)

        assert not halves.snapshots.read().meta.exact
        assert torch.equal(halves.vector(), weights.bfloat16().float())
        assert {name for name in halves.tensor_keys() if name.startswith("s:2.1:")} == {"s:2.1:h0"}

    def test_its_other_bits_follow_when_nothing_else_is_to_be_done(
        self, halves: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shard, weights = self.begin(halves)
        monkeypatch.setattr(publish, "EXACT_SECONDS", 0.0)

        assert shard.turn() == 0

        assert halves.snapshots.read().meta.exact
        assert torch.equal(halves.vector(), weights)
        assert halves.snapshots.version() == 2
        successor = halves.shard(2)
        successor.turn()
        assert successor._model is not None
        assert torch.equal(successor._model.weights, weights)
        assert not halves.events("rounded")

    def test_a_successor_that_finds_half_the_bits_goes_on_from_them_and_says_so(
        self, halves: World
    ) -> None:
        _, weights = self.begin(halves)

        successor = halves.shard(2)
        successor.turn()

        assert successor._model is not None
        assert torch.equal(successor._model.weights, weights.bfloat16().float())
        (event,) = halves.events("rounded")
        assert event["details"]["version"] == 2
        self.publish(halves, successor, 2)
        assert halves.snapshots.read().record.positions == {0: 2, 1: 2, 2: 2}

    def test_what_is_kept_is_exact(self, halves: World) -> None:
        shard, weights = self.begin(halves)
        halves.snapshots.request_pin("wanted")

        shard.turn()

        pinned, vector = halves.snapshots.fetch_pinned("wanted")
        assert pinned.meta.version == 2
        assert torch.equal(vector, weights)
        halves.snapshots.unpin("wanted")
        shard.turn()
        assert torch.equal(halves.vector(), weights)
        for subtask in (2, 3):
            self.publish(halves, shard, subtask)
        assert not [name for name in halves.tensor_keys() if name.startswith("s:2.1:")]

    def test_the_end_of_an_epoch_is_exact(self, halves: World) -> None:
        shard, _ = self.begin(halves)
        for subtask in range(halves.spec.subtasks_per_epoch):
            start = 2 if subtask < 2 else 0
            vector = torch.randn(halves.layout.floats)
            halves.push(subtask, start, halves.plan.size(subtask), vector=vector)
        shard.turn()

        assert halves.snapshots.read().record.finished == 1
        assert halves.snapshots.read().meta.exact
        assert shard._model is not None
        assert torch.equal(halves.snapshots.fetch_pinned("epoch-1")[1], shard._model.weights)

    def test_a_failover_between_the_bits_and_their_description(self, halves: World) -> None:
        """The remaining description matches the remaining chunks."""
        shard, weights = self.begin(halves)
        assert shard._model is not None
        completed = halves.snapshots.complete(shard._model.meta, shard._model.weights)
        halves.tensors.delete(halves.snapshots.chunk_keys(completed)[1])

        with pytest.raises(StoreUnavailable):
            halves.snapshots.commit(1, completed, Change(base=2))

        assert not halves.snapshots.read().meta.exact
        rounded = torch.empty(halves.layout.floats)
        halves.snapshots.fetch(rounded)
        assert ((rounded - weights).abs() <= weights.abs() * 2**-8).all()
