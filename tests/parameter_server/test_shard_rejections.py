"""Updates that the parameter server's shard rejects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.world import MakeWorld, World
from torch import Tensor

from vcasgd.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable
from vcasgd.learning.rules import Context
from vcasgd.parameter_server.receive import POISON, UPDATE_ATTEMPTS
from vcasgd.parameter_server.reports import REJECTIONS_BEFORE_QUARANTINE
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.ledger.leases import Wait
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import encode_integers

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
        shard = world.started_shard(token=2)
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
        assert not world.tensor_keys("u:"), "payload deleted"
        assert 0 < world.tensors.ttl(world.keys.rejected) <= 3600, "it must not grow forever"

    def test_an_honest_update_behind_it_is_applied_all_the_same(self, world: World) -> None:
        for _, _, make in REJECTED:
            world.inject(*make(world))
        world.push(0, 2, 4)
        world.push(2, 0, 4)
        shard = world.shard(token=2)

        assert shard.turn() == len(REJECTED) + 2

        world.assert_exact()
        assert world.positions() == {0: 4, 2: 4}
        assert sum(world.rejected().values()) == len(REJECTED)

    def test_the_worker_that_was_rejected_does_it_again(self, world: World) -> None:
        """Its samples are open again, and its later updates are not applied."""
        shard = world.started_shard(token=2)
        world.push(0, 2, 3, checksum=1)
        follower, _ = world.push(0, 3, 4)
        shard.turn()
        assert world.fate(follower) == "rejected:out-of-place"
        assert world.sender.begin(0, 0, 4, 1) == 2

        world.apply(shard, 0, 2, 4)

        assert world.positions() == {0: 4}
        world.assert_exact()

    def test_a_late_duplicate_of_a_finished_epoch_leaves_nothing(self, world: World) -> None:
        shard = world.shard(token=2)
        duplicate, payload = world.update(1, 0, 4, 1)
        world.push(0, 2, 4)
        world.push(1, 0, 4)
        world.apply(shard, 2, 0, 4)
        world.inject(duplicate, bytes(payload))
        shard.turn()

        assert world.rejected() == {"duplicate": 1}
        assert world.tensors.hkeys(world.keys.pushed) == []
        world.assert_exact()

    def test_after_several_in_a_row_the_worker_gets_no_more_work(self, world: World) -> None:
        shard = world.started_shard(token=2)
        for number in range(REJECTIONS_BEFORE_QUARANTINE):
            assert world.jobs.workers.quarantined(world.job) == {}, f"after {number}"
            world.push(1, 0, 2, checksum=1, worker="bad")
            world.apply(shard, 2, 0, 2, checksum=1, worker=f"good-{number}")

        assert world.jobs.workers.quarantined(world.job).keys() == {"bad"}
        assert "checksum" in world.jobs.workers.quarantined(world.job)["bad"]
        (event,) = world.events("worker-quarantined")
        assert event["details"]["worker"] == "bad"
        answer = world.leases("bad").acquire()
        assert isinstance(answer, Wait)
        assert answer.quarantined
        assert not world.jobs.workers.quarantine(world.job, "bad", "again"), "already quarantined"
        assert len(world.events("update-rejected")) == 2 * REJECTIONS_BEFORE_QUARANTINE

    def test_an_applied_update_clears_the_worker(self, world: World) -> None:
        shard = world.started_shard(token=2)
        for _ in range(REJECTIONS_BEFORE_QUARANTINE - 1):
            world.apply(shard, 1, 0, 1, checksum=1)
        world.push(1, 0, 1)
        for _ in range(REJECTIONS_BEFORE_QUARANTINE - 1):
            world.apply(shard, 2, 0, 1, checksum=1)

        assert world.jobs.workers.quarantined(world.job) == {}

    def test_later_rejections_keep_no_earlier_ones(self, world: World) -> None:
        """A job with some in each hour would fail after months: there are too many."""
        shard = world.started_shard(token=2)
        world.apply(shard, 1, 0, 1, checksum=1)
        world.tensors.expire(world.keys.rejected, 100)

        world.apply(shard, 2, 0, 1, checksum=1)

        assert world.tensors.hlen(world.keys.rejected) == 2
        assert world.tensors.ttl(world.keys.rejected) <= 100

    def test_being_late_is_no_fault(self, world: World) -> None:
        shard = world.started_shard(token=2)
        for _ in range(2 * REJECTIONS_BEFORE_QUARANTINE):
            for start in (0, 3):
                header, payload = world.update(0, start, start + 1, 1, worker="late")
                world.inject(header, bytes(payload))
            shard.turn()

        assert world.rejected() == {"duplicate": 10, "out-of-place": 10}
        assert world.jobs.workers.quarantined(world.job) == {}
        assert world.events("update-rejected") == []

    def test_sums_stay_finite_whatever_a_worker_claims(self, world: World) -> None:
        shard = world.started_shard(token=2)
        for start in (0, 1, 2, 3):
            world.push(1, start, start + 1, loss_sum=1e200)
        world.now += 10
        shard.turn()

        json.dumps(world.jobs.get(world.job).totals, allow_nan=False)
        json.dumps(world.jobs.metrics(world.job), allow_nan=False)


class TestPoison:
    """Updates that find a defect of the parameter server."""

    MARK = 7.0

    @pytest.fixture
    def shard(self, make_world: MakeWorld) -> Shard:
        self.world = make_world()
        return self.world.started_shard(token=1)

    def push_poison(self, subtask: int = 0) -> Header:
        vector = self.MARK * self.world.delta(subtask, 0, 2)
        header, _ = self.world.push(subtask, 0, 2, vector=vector)
        return header

    def break_blend(self, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the rule raise an error after it has blended a marked update."""
        blend = shard._config.rule.blend

        def broken(weights: Tensor, numbers: Tensor, context: Context) -> None:
            marked = bool((numbers == self.MARK).any())
            blend(weights, numbers, context)
            if marked:
                raise ValueError("a defect")

        monkeypatch.setattr(shard._config.rule, "blend", broken)

    def test_ends_as_a_rejected_update_with_the_error(
        self, shard: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given an update behind one that can't be applied
        self.break_blend(shard, monkeypatch)
        poison = self.push_poison()
        honest, _ = self.world.push(1, 0, 2)

        for _ in range(UPDATE_ATTEMPTS):
            with pytest.raises(ValueError, match="a defect"):
                shard.turn()

        # Then it is refused, and the other one is applied
        assert shard.turn() == 2
        assert self.world.fate(poison) == f"rejected:{POISON}"
        assert self.world.fate(honest) == "applied"
        self.world.assert_exact()

        # and the job says why
        shard.turn()
        (event,) = self.world.events("update-rejected")
        assert "samples 0 to 2 of subtask 0, failed 3 times: ValueError: a defect" in event["text"]
        (failure,) = self.world.jobs.failures(self.world.job)
        assert (failure.worker, failure.piece) == ("worker", "train:0")
        assert "in broken" in failure.traceback

        # and its samples are trained again
        assert self.world.sender.begin(0, 0, 4, 1) == 0
        self.world.push(0, 0, 4)
        assert shard.turn() == 1
        self.world.assert_exact()

    def test_several_of_them_end_too(self, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.break_blend(shard, monkeypatch)
        self.push_poison(0)
        self.push_poison(1)
        for _ in range(2 * UPDATE_ATTEMPTS):
            with pytest.raises(ValueError, match="a defect"):
                shard.turn()

        assert shard.turn() == 2
        shard.turn()
        assert self.world.rejected() == {POISON: 2}
        assert len(self.world.jobs.failures(self.world.job)) == 2

    @pytest.mark.parametrize("kind", [StoreUnavailable, StoreDenied, StoreFull])
    def test_an_error_of_the_store_never_counts(
        self, shard: Shard, monkeypatch: pytest.MonkeyPatch, kind: type[StoreError]
    ) -> None:
        # Given a store that fails more often than an update may
        def fail(*_: object) -> None:
            raise kind("no")

        header, _ = self.world.push(0, 0, 2)
        with monkeypatch.context() as broken:
            broken.setattr(shard._reader, "receive", fail)
            for _ in range(2 * UPDATE_ATTEMPTS):
                with pytest.raises(kind):
                    shard.turn()

        assert shard.turn() == 1
        assert self.world.fate(header) == "applied"
        assert self.world.rejected() == {}
