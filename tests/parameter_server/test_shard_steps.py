"""Steps of the published model: workers that add them have it bit for bit, whatever dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness import RedisServer
from support.servers import Fault, Moment, through_proxy
from support.waiting import await_truth
from support.world import MakeWorld, World

from vcasgd.errors import StoreError, StoreUnavailable
from vcasgd.learning.encodings.encoder import step_format
from vcasgd.learning.encodings.steps import checksum
from vcasgd.learning.shards import Cut
from vcasgd.parameter_server import reports
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.tensors.snapshot import Meta, PublishedStep

SAMPLES = 3000


def extended(value: object) -> Any:
    return pytest.param(value, marks=pytest.mark.extended)


class Follower:
    """A worker's copy of the model."""

    def __init__(self, world: World) -> None:
        self._world = world
        layout = world.layout
        (part,) = Cut(layout.floats, layout.parameters, 1).parts
        steps = step_format(world.spec.update, layout, part)
        assert steps is not None
        self._steps = steps
        self.vector = torch.zeros(layout.floats)
        self.base: tuple[int, int] | None = None

    def follow(self) -> int:
        """Get the present version; return the number of bytes that it took."""
        tensors = self._world.tensors
        before = tensors.bulk_received
        meta = self._world.snapshots.follow(self.vector, self.base, self._steps)
        took = tensors.bulk_received - before
        self.base = (meta.version, meta.token)
        whole = torch.empty(len(self.vector))
        self._world.snapshots.fetch_rounded(whole)
        assert torch.equal(self.vector, whole)
        return took

    @property
    def whole(self) -> int:
        """Bytes of the whole model."""
        return 4 * len(self.vector)


def world_of(make_world: MakeWorld, codec: str = "int2", **update: Any) -> World:
    update = update or {"rule": "async-local-sgd", "eta": 1.0}
    return make_world(
        samples=SAMPLES, epochs=1, subtasks_per_epoch=12, update={**update, "codec": codec}
    )


def publish(world: World, shard: Shard, nth: int, **changes: Any) -> torch.Tensor:
    """Push the nth update, with all its numbers, and publish it; return it."""
    delta = torch.randn(world.layout.floats, generator=torch.Generator().manual_seed(nth))
    before = world.snapshots.version()
    world.push(nth, 0, 1, vector=delta, last=True, **changes)
    # A round may wait for a moment.
    await_truth(lambda: shard.turn() >= 0 and world.snapshots.version() > before)
    return delta


def step_chunks(world: World) -> set[str]:
    return {key for key in world.tensor_keys("s:") if ":d" in key}


@pytest.mark.parametrize(("codec", "part"), [("int8", 3.9), ("int2", 11.5), ("topk", 3)])
def test_a_worker_follows_with_a_part_of_the_bytes(
    make_world: MakeWorld, codec: str, part: float
) -> None:
    world = world_of(make_world, codec)
    shard, worker, total = world.shard(), Follower(world), torch.zeros(SAMPLES + 1)
    assert worker.follow() == worker.whole
    for nth in range(4):
        total[:-1] += publish(world, shard, nth)[:-1]

        assert worker.follow() <= worker.whole / part
        # What is stored for checkpoints and evaluations lacks nothing.
        assert torch.allclose(world.vector()[:-1], total[:-1], atol=1e-5)
        assert not torch.equal(worker.vector, world.vector())
        assert worker.vector[-1] == world.vector()[-1]


def test_a_worker_adds_several_steps_at_once(make_world: MakeWorld) -> None:
    world = world_of(make_world)
    shard, worker = world.shard(), Follower(world)
    publish(world, shard, 0)
    worker.follow()
    for nth in (1, 2, 3):
        publish(world, shard, nth)

    assert 0 < worker.follow() < worker.whole / 2


def test_a_worker_that_is_far_behind_fetches_the_whole(make_world: MakeWorld) -> None:
    world = world_of(make_world, "int8")
    shard, worker = world.shard(), Follower(world)
    worker.follow()
    for nth in range(12):
        publish(world, shard, nth)

    assert worker.follow() == worker.whole
    # The steps take no more memory than a model.
    sizes = [world.tensors.strlen(world.keys.prefix + key) for key in step_chunks(world)]
    assert 4 * 1500 < sum(sizes) < worker.whole


def test_what_is_pinned_and_in_checkpoints_is_the_exact_model(make_world: MakeWorld) -> None:
    world = world_of(make_world, "int2")
    shard, worker = world.shard(), Follower(world)
    delta = publish(world, shard, 0)
    world.snapshots.request_pin("wanted")
    shard.turn()
    stored = world.checkpoint()

    pinned, vector = world.snapshots.fetch_pinned("wanted")
    assert torch.equal(vector[:-1], delta[:-1])
    assert pinned.meta.steps == ()
    # When both servers are lost, training continues from the exact model.
    worker.follow()
    world.lose_tensors()
    successor = world.started_shard()
    assert stored.version == world.snapshots.version() == 1
    assert worker.follow() == worker.whole
    assert torch.equal(worker.vector[:-1], delta[:-1])
    publish(world, successor, 1)
    assert worker.follow() < worker.whole / 10


def test_no_step_leads_back_to_an_earlier_model(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "TUNED_SECONDS", 0.0)
    world = world_of(make_world)
    shard, worker = world.shard(), Follower(world)
    publish(world, shard, 0)
    stored = world.checkpoint()
    back = world.vector()
    publish(world, shard, 1)
    worker.follow()

    assert world.jobs.roll_back(world.job, 1, stored.name, "loss 1 → nan", epoch=1.0)
    shard.turn()
    shard.turn()

    assert world.snapshots.read().meta.rollbacks == 1
    assert worker.follow() == worker.whole
    assert torch.equal(worker.vector, back)
    assert not step_chunks(world)
    publish(world, shard, 2, rollbacks=1)
    assert worker.follow() < worker.whole / 10


class TestDamage:
    """A worker gets the right version despite anything stored instead of a step."""

    @pytest.fixture
    def behind(self, make_world: MakeWorld) -> tuple[World, Follower]:
        """A worker that lacks the last step."""
        world = world_of(make_world)
        shard, worker = world.shard(), Follower(world)
        publish(world, shard, 0)
        worker.follow()
        publish(world, shard, 1)
        return world, worker

    @pytest.mark.parametrize(
        ("byte", "more"),
        [(None, 0), (b"", 0), (b"\0", 0), (b"\xff", 0), (b"\0", 1), (b"\0", 1 << 20)],
        ids=["missing", "empty", "zeros", "ones", "longer", "far longer"],
    )
    def test_of_a_chunk(
        self, behind: tuple[World, Follower], byte: bytes | None, more: int
    ) -> None:
        world, worker = behind
        (key,) = (key for key in step_chunks(world) if key.startswith("s:2."))
        size = world.tensors.strlen(world.keys.prefix + key)
        # Eight blocks, packed.
        assert 700 < size < 1024
        if byte is None:
            world.tensors.delete(world.keys.prefix + key)
        else:
            world.tensors.set(world.keys.prefix + key, byte * (size + more))

        assert worker.follow() >= worker.whole

    @pytest.mark.parametrize("size", [0, 4, 1536, 11_999])
    def test_of_the_size(self, behind: tuple[World, Follower], size: int) -> None:
        world, worker = behind
        meta = world.snapshots.read_meta()
        last = meta.steps[-1]
        self.describe(world, meta, PublishedStep(last.version, last.token, size))

        assert worker.follow() >= worker.whole

    def test_of_the_base(self, behind: tuple[World, Follower]) -> None:
        _, worker = behind
        worker.vector[5] += 1e-3

        assert worker.follow() > worker.whole

    def test_of_the_checksum(self, behind: tuple[World, Follower]) -> None:
        world, worker = behind
        meta = world.snapshots.read_meta()
        assert meta.checksum != checksum(worker.vector)
        self.describe(world, meta, meta.steps[-1], checksum=checksum(worker.vector))

        assert worker.follow() > worker.whole

    @staticmethod
    def describe(world: World, meta: Meta, step: PublishedStep, **changes: Any) -> None:
        text = {**Meta.from_json(meta.to_json().encode()).__dict__, **changes}
        text["steps"] = (*meta.steps[:-1], step)
        world.tensors.set(world.keys.meta, Meta(**text).to_json())


def test_rounds_have_steps_too(make_world: MakeWorld) -> None:
    world = world_of(make_world, rule="rounds")
    worker = Follower(world)
    worker.follow()
    shard = world.shard()
    for nth in range(5):
        publish(world, shard, nth, base=nth)
        assert worker.follow() < worker.whole / 10
        if nth == 2:
            shard = world.shard()

    assert (worker.vector - world.vector()).norm() < 0.3 * world.vector().norm()


@pytest.mark.parametrize("moment", ["before", extended("after")])
@pytest.mark.parametrize("dies", [True, extended(False)], ids=["killed", "disconnected"])
def test_faults_at_each_command_of_a_publication(
    server: RedisServer, make_world: MakeWorld, moment: Moment, dies: bool
) -> None:
    """Also between the encoding of a step and its commit."""
    fired = 0
    for at in range(1, 60):
        world, fault = world_of(make_world), Fault(at, moment)
        with through_proxy(server, 1, fault) as tensors:
            shard, worker = world.shard(tensors=tensors), Follower(world)
            total = publish(world, shard, 0)[:-1].clone()
            worker.follow()
            delta = torch.randn(world.layout.floats, generator=torch.Generator().manual_seed(9))
            total += delta[:-1]
            world.push(1, 0, 1, vector=delta, last=True)
            fault.arm()
            try:
                shard.turn()
            except (StoreUnavailable, StoreError):
                shard = world.shard() if dies else shard
            fault.disarm()
            fired += fault.fired
            shard.turn()
            shard.turn()

            worker.follow()
            assert torch.allclose(world.vector()[:-1], total, atol=1e-5)
            total += publish(world, shard, 2)[:-1]
            assert worker.follow() < worker.whole / 10
            assert torch.allclose(world.vector()[:-1], total, atol=1e-5)
            assert len(step_chunks(world)) == len(world.snapshots.read_meta().steps)
        if not fault.fired:
            break
    assert 8 < fired < 59
