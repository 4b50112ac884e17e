"""Encodings of updates and rounded snapshots in the parameter server's shard."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.honest_workers import HonestWorker, run_to_end
from support.world import MakeWorld, World
from torch import Tensor

from vcasgd.errors import (
    StoreUnavailable,
)
from vcasgd.parameter_server import publish
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.tensors.snapshot import Change


@pytest.mark.parametrize(
    ("codec", "fields"),
    [
        *((codec, {}) for codec in ("float32", "bfloat16", "int8", "topk", "partition")),
        ("rows", {"samples": 600, "table": True}),
    ],
)
def test_a_whole_job(make_world: MakeWorld, codec: str, fields: dict[str, Any]) -> None:
    world = make_world(update={"rule": "async-local-sgd", "eta": 1.0, "codec": codec}, **fields)
    shard, interval = world.shard(), world.plan.samples // 6
    workers = [HonestWorker(world, "a", interval=interval)]
    workers.append(HonestWorker(world, "b", interval=interval + 1))

    run_to_end(world, workers, shard.turn)

    assert shard.turn() == 0
    evaluated = [each.epoch for each in world.jobs.get(world.job).evaluations]
    assert evaluated in ([1], [1, 2]), "the last one may still be open"
    totals = world.jobs.get(world.job).totals
    applied = world.plan.total_samples
    assert (totals["samples"], totals["applied"], totals["repeated"]) == (applied, applied, 0)


class TestInt8:
    def test_differences_are_rounded_and_statistics_are_not(self, make_world: MakeWorld) -> None:
        world = make_world(update={"rule": "async-local-sgd", "eta": 1.0, "codec": "int8"})
        delta = torch.tensor([127.0, -63.4, *[0.0] * 10, 1e-6])

        world.push(0, 0, 2, vector=delta)
        assert world.shard().turn() == 1

        assert world.vector().tolist() == [127.0, -63.0, *[0.0] * 10, (delta[-1] / 2).item()]

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

            encoded = encoder.encode(delta, last=last)
            payload = b"".join(encoded.chunks(1 << 20))
            header, _ = world.push(0, nth, nth + 1, payload=payload, codec=encoded.codec)
            assert shard.turn() == 1
            assert world.fate(header) == "applied"
            exact = torch.allclose(world.vector(), total, rtol=1e-5, atol=1e-5)

            # Then both are completely in the model
            assert exact is last


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
        shard = world.started_shard(1)
        self.publish(world, shard, 0)
        return shard, self.publish(world, shard, 1)

    def test_a_publication_that_follows_soon_is_rounded(self, halves: World) -> None:
        _, weights = self.begin(halves)

        assert not halves.snapshots.read().meta.exact
        assert torch.equal(halves.vector(), weights.bfloat16().float())
        assert halves.tensor_keys("s:2.1:") == {"s:2.1:h0"}

    def test_its_other_bits_follow_when_nothing_else_is_to_be_done(
        self, halves: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shard, weights = self.begin(halves)
        monkeypatch.setattr(publish, "EXACT_SECONDS", 0.0)

        assert shard.turn() == 0

        assert halves.snapshots.read().meta.exact
        assert torch.equal(halves.vector(), weights)
        assert halves.snapshots.version() == 2
        successor = halves.started_shard(2)
        assert successor._model is not None
        assert torch.equal(successor._model.weights, weights)
        assert not halves.events("rounded")

    def test_a_successor_that_finds_half_the_bits_goes_on_from_them_and_says_so(
        self, halves: World
    ) -> None:
        _, weights = self.begin(halves)

        successor = halves.started_shard(2)

        assert successor._model is not None
        assert torch.equal(successor._model.weights, weights.bfloat16().float())
        (event,) = halves.events("rounded")
        assert event["details"]["version"] == 2
        self.publish(halves, successor, 2)
        assert halves.positions() == {0: 2, 1: 2, 2: 2}

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
        assert not halves.tensor_keys("s:2.1:")

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
        assert halves.snapshots.complete(completed, weights) is completed
        halves.tensors.delete(halves.snapshots.chunk_keys(completed)[1])

        with pytest.raises(StoreUnavailable):
            halves.snapshots.commit(1, completed, Change(base=2))

        assert not halves.snapshots.read().meta.exact
        rounded = torch.empty(halves.layout.floats)
        halves.snapshots.fetch_rounded(rounded)
        assert ((rounded - weights).abs() <= weights.abs() * 2**-8).all()
