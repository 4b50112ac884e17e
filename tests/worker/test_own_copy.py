"""A worker that keeps its own copy of the model: what it has, what it pushes, what it fetches."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from support.servers import Fault, through_proxy
from support.shard_pair import COARSE, MakePair, ShardPair
from support.waiting import PATIENCE, await_truth
from support.work import memory_of

from vcasgd.errors import NonFiniteLoss
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Floats, MappedVector
from vcasgd.store.connection import RedisClient
from vcasgd.worker import shard_link
from vcasgd.worker.exchange import Exchange
from vcasgd.worker.own_copy import OwnCopy
from vcasgd.worker.own_part import Moved, OwnPart
from vcasgd.worker.vectors import Vector, VectorPool

SAMPLES = 30  # in three subtasks
#: Seeds of random orders.
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(2, 6))]


class Trainee:
    """A worker whose training adds 1 to the parameter of each sample.

    ``mapped``: its process has only parts of the vectors.
    """

    def __init__(
        self,
        pair: ShardPair,
        name: str,
        subtask: int,
        *,
        mapped: bool = False,
        nodes: list[RedisClient] | None = None,
    ) -> None:
        self.pair, self.name, self.subtask = pair, name, subtask
        # Its own, because clients count what they receive.
        self.nodes = nodes or [server.client() for server in pair.servers]
        self.exchange = Exchange(self.nodes, pair.world.job, patience=10)
        spec, layout = pair.world.spec, pair.world.layout
        self.exchange.open(pair.cut, spec.update, layout, adopts=True, mapped=mapped)
        self.exchange.begin(subtask, 0, pair.world.plan.size(subtask), 1)
        self.exchange.refresh(again=True)
        self.model = torch.empty(0)
        self.position, self.pushes, self.pushed_at = 0, 0, 0.0

    @property
    def copy(self) -> OwnCopy:
        assert self.exchange.copy is not None
        return self.exchange.copy

    def close(self) -> None:
        self.exchange.close()
        for node in self.nodes:
            node.close()

    def start(self) -> None:
        """Start an interval, as the trainer does."""
        base = self.exchange.start_interval(keep_copy=True)
        if not base.continues:
            self.model = base.floats[:].clone()

    def step(self) -> None:
        """Train a sample, and follow the exchange."""
        self.model += self.pair.world.delta(self.subtask, self.position, self.position + 1)
        self.position += 1
        self.follow()

    def follow(self, *, wait: bool = False) -> None:
        if self.exchange.copy is None:
            return
        every = range(len(self.pair.nodes)) if wait else ()
        for part, shift in self.copy.take_shifts(wait=every):
            part.of(self.model).add_(shift.memory[:])
            shift.release()
        if not wait:
            self.copy.follow()

    def push(self, start: int) -> None:
        self.push_parts(dict.fromkeys(range(len(self.pair.nodes)), start))

    def push_parts(self, starts: Mapping[int, int]) -> None:
        """Push what some shards lack since a sample."""
        self.follow(wait=True)
        self.pushes += 1
        fields = {"update": f"{self.name}.{self.pushes}", "worker": self.name,
                  "subtask": self.subtask, "stop": self.position, "token": 1,
                  "loss_sum": 1.0, "layout": self.pair.world.layout.digest()}  # fmt: skip

        def read(part: ShardRange, out: Floats) -> None:
            out[:].copy_(part.of(self.model))

        headers = {shard: {**fields, "start": start} for shard, start in starts.items()}
        self.pushed_at = time.monotonic()
        self.copy.push(headers, 0, read, torch.zeros(1).long(), last=True)

    def train(self, samples: int) -> None:
        start = self.position
        self.start()
        for _ in range(samples):
            self.step()
        self.push(start)

    def await_versions(self, version: int) -> None:
        """Follow until the copy has what the versions of all shards have."""

        def has_all() -> bool:
            self.follow()
            newest = all((link.version or (0,))[0] >= version for link in self.exchange)
            return newest and not (self.exchange.copy and self.copy.merging)

        await_truth(has_all)

    @property
    def fetched(self) -> int:
        return self.exchange.counts()["fetched_bytes"] or 0


@pytest.fixture(params=[1, 2], ids=["one shard", "two shards"])
def job(
    request: pytest.FixtureRequest, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ShardPair]:
    # A model that is read by itself, as large ones are.
    monkeypatch.setattr(shard_link, "SMALL_SNAPSHOT", 0)
    with make_pair(request.param, samples=SAMPLES) as job:
        yield job


@pytest.fixture
def worker(job: ShardPair) -> Iterator[Trainee]:
    trainee = Trainee(job, "w", 0)
    yield trainee
    trainee.close()


@pytest.fixture
def other(job: ShardPair) -> Iterator[Trainee]:
    trainee = Trainee(job, "o", 1)
    yield trainee
    trainee.close()


@pytest.fixture
def commit(job: ShardPair) -> Callable[..., None]:
    """Return a function that publishes what workers have pushed, on some or all nodes."""
    servers = [job.shard(shard) for shard in range(len(job.nodes))]

    def commit(*workers: Trainee, shards: range | list[int] | None = None) -> None:
        for each in workers:
            assert each.exchange.flush(10)
        for shard in shards if shards is not None else range(len(servers)):
            servers[shard].turn()

    return commit


def test_a_worker_that_is_alone_fetches_nothing(
    job: ShardPair, worker: Trainee, commit: Callable[..., None]
) -> None:
    fetched = {worker.fetched}
    for number in range(1, 5):
        worker.train(2)
        commit(worker)
        worker.await_versions(number)
        fetched.add(worker.fetched)

    assert len(fetched) == 1
    assert torch.equal(worker.model, job.world.delta(0, 0, 8))
    assert torch.equal(job.published(), worker.model)


def test_a_step_that_is_longer_than_an_exchange_does_not_count(
    worker: Trainee, commit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a step that lasts longer than the second exchange
    monkeypatch.setattr(shard_link, "COMMIT_WAIT_SECONDS", 3.0)
    worker.train(2)
    commit(worker)
    worker.await_versions(1)
    assert worker.copy.take_exchange_seconds() is not None
    worker.train(2)
    commit(worker)
    await_truth(lambda: all(link.sees_newer for link in worker.exchange))
    ended, steps = time.monotonic(), time.monotonic() + 0.2
    await_truth(lambda: time.monotonic() > steps)

    worker.await_versions(2)

    seconds = worker.copy.take_exchange_seconds()
    assert seconds is not None
    assert seconds < ended - worker.pushed_at


def test_a_worker_that_is_alone_keeps_no_base(
    worker: Trainee, commit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = list[list[Vector]]()
    trim = VectorPool.trim

    def note(pool: VectorPool) -> None:
        trimmed.append([*pool.free])
        trim(pool)

    monkeypatch.setattr(VectorPool, "trim", note)
    worker.train(2)
    assert len(trimmed) == 1
    commit(worker)
    worker.await_versions(1)

    # Both of the exchange, of which one was the base
    assert sum(map(len, trimmed)) == 2


def test_progress_of_another_worker_joins_in_the_middle_of_an_interval(
    job: ShardPair, worker: Trainee, other: Trainee, commit: Callable[..., None]
) -> None:
    # Given an own update that isn't applied, and one of another worker that is
    worker.train(2)
    other.train(3)
    commit(other)

    # When the worker is in its next interval
    worker.start()
    worker.step()
    worker.await_versions(1)
    worker.step()

    # Then its copy has both updates and its progress, and pushes only the latter
    both = job.world.delta(0, 0, 2) + job.world.delta(1, 0, 3)
    assert torch.equal(worker.model, both + job.world.delta(0, 2, 4))
    worker.push(2)
    commit(worker)
    assert torch.equal(job.published(), worker.model)


def test_an_interval_without_a_push_leaves_nothing_in_the_next_one(
    job: ShardPair, worker: Trainee, commit: Callable[..., None]
) -> None:
    worker.train(2)
    worker.start()
    worker.step()  # and then the user's code fails

    worker.position = 2
    worker.train(3)
    commit(worker)

    assert torch.equal(job.published(), job.world.delta(0, 0, 5))


def test_after_a_rejected_update_the_copy_is_given_up(
    job: ShardPair, worker: Trainee, commit: Callable[..., None]
) -> None:
    worker.train(1)
    commit(worker)
    worker.await_versions(1)
    worker.position = 3  # Samples 1 and 2 are missing.
    worker.train(2)
    assert worker.exchange.flush(PATIENCE)

    def is_given_up() -> bool:
        return worker.exchange.settle().rework == {0}

    await_truth(is_given_up)
    assert worker.exchange.copy is None
    worker.exchange.refresh(again=True)
    assert torch.equal(worker.exchange.base.floats, job.world.delta(0, 0, 1))


def test_a_copy_that_is_not_finite_is_an_error_and_never_pushed(
    job: ShardPair, worker: Trainee, commit: Callable[..., None]
) -> None:
    worker.start()
    worker.step()
    worker.model[0] = float("inf")
    worker.push(0)

    def is_raised() -> bool:
        try:
            worker.exchange.settle()
        except NonFiniteLoss:
            return True
        return False

    await_truth(is_raised)
    assert worker.exchange.copy is None
    commit()
    assert not job.published().any()


def test_an_adopted_version_is_no_base(
    job: ShardPair, worker: Trainee, commit: Callable[..., None]
) -> None:
    for number in (1, 2):
        worker.train(1)
        commit(worker)
        worker.await_versions(number)
    worker.train(1)
    commit(worker)
    await_truth(lambda: all(link.idle or link.fetched for link in worker.exchange))

    worker.exchange.forget(2)  # The lease of another subtask was lost.
    worker.exchange.refresh(again=False)

    assert torch.equal(worker.exchange.base.floats, job.published())


def test_a_copy_gets_an_update_that_it_began_without(
    job: ShardPair, worker: Trainee, commit: Callable[..., None]
) -> None:
    # Given a copy that begins while an update of the previous one isn't applied
    worker.train(2)
    worker.exchange.forget(2)  # The lease of another subtask was lost.
    worker.exchange.refresh(again=True)
    worker.start()
    worker.step()
    assert torch.equal(worker.model, job.world.delta(0, 2, 3))

    commit(worker)
    worker.await_versions(1)

    assert torch.equal(worker.model, job.world.delta(0, 0, 3))


def test_a_worker_with_nothing_to_do_learns_what_became_of_its_updates(
    job: ShardPair, worker: Trainee, other: Trainee, commit: Callable[..., None]
) -> None:
    worker.train(1)
    other.train(1)
    commit(other)
    worker.await_versions(1)
    worker.train(1)
    commit(worker)

    def is_settled() -> bool:
        worker.exchange.settle()
        return not worker.exchange.subtasks()

    other.train(1)
    commit(other)
    await_truth(is_settled)
    worker.train(2)
    commit(worker)
    expected = job.world.delta(0, 0, 4) + job.world.delta(1, 0, 2)
    assert torch.equal(job.published(), expected)


def test_a_copy_goes_back_with_a_model_that_was_lost(
    job: ShardPair, worker: Trainee, commit: Callable[..., None]
) -> None:
    worker.train(2)
    commit(worker)
    worker.await_versions(1)
    for shard in range(len(job.nodes)):
        job.nodes[shard].flushall()
        job.install(shard)

    def goes_back() -> bool:
        worker.follow()
        return worker.exchange.went_back

    worker.start()
    worker.copy.integers += 1
    await_truth(goes_back)

    # Then nothing of it is left, neither its parameters nor its statistics and counters
    worker.exchange.refresh(again=True)
    worker.start()
    assert not worker.model.any()
    assert not worker.copy.integers.any()


def test_an_update_that_overtakes_a_lost_one_is_in_the_model_once(make_pair: MakePair) -> None:
    with make_pair(1, samples=SAMPLES) as job:
        server, done = job.shard(0), threading.Event()
        server.turn()

        def overtake() -> None:
            """Apply one of the next subtask, and one of another worker, to an empty server."""
            job.nodes[0].flushall()
            server.turn()
            worker.subtask, worker.position = 1, 0
            worker.train(1)
            assert worker.exchange.flush(PATIENCE)
            job.world.push(2, 0, 1)
            server.turn()
            done.set()

        # Given an update that the server loses before the worker asks what became of it
        question = Fault(1, instead=overtake)
        with through_proxy(job.servers[0], 0, question) as node:
            worker = Trainee(job, "w", 0, nodes=[node])
            worker.train(2)
            assert worker.exchange.flush(PATIENCE)
            await_truth(lambda: worker.exchange[0].idle)
            question.arm()
            worker.exchange[0].poll(newer=True)
            assert done.wait(PATIENCE)

            def has_followed() -> bool:
                worker.follow()
                return worker.exchange.went_back or worker.exchange[0].version == (2, 1)

            await_truth(has_followed)
            if worker.exchange.went_back:
                worker.exchange.refresh(again=True)
                worker.start()
            else:
                worker.follow(wait=True)
            assert worker.model.max() == 1

            # Then it pushes the lost one again
            assert worker.exchange.flush(PATIENCE)
            server.turn()
            worker.await_versions(3)
            expected = [job.world.delta(*each) for each in ((0, 0, 2), (1, 0, 1), (2, 0, 1))]
            assert torch.equal(worker.model, torch.stack(expected).sum(0))
            assert torch.equal(job.published(), worker.model)
            worker.close()


def train_to_the_end(
    job: ShardPair,
    commit: Callable[..., None],
    drawn: random.Random,
    workers: list[Trainee],
    train: Callable[[int], None],
    settles: Callable[[Trainee], bool],
) -> None:
    """Let nodes publish at any time while both workers train a subtask."""
    ends = [job.world.plan.size(number) for number in range(2)]
    while any(trainee.position < end for trainee, end in zip(workers, ends, strict=True)):
        for number in range(2):
            train(number)
        commit(*workers, shards=drawn.sample(range(len(job.nodes)), drawn.randint(0, 1)))
        for trainee in workers:
            trainee.follow()
            if any(link.updates.full for link in trainee.exchange):
                commit(*workers)
                await_truth(partial(settles, trainee))
    commit(*workers)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_is_in_the_model_once_whatever_the_order(
    job: ShardPair, commit: Callable[..., None], seed: int
) -> None:
    drawn = random.Random(seed)
    workers = [Trainee(job, f"w{number}", number, mapped=seed % 2 == 1) for number in range(2)]
    ends = [job.world.plan.size(number) for number in range(2)]

    def train(number: int) -> None:
        trainee = workers[number]
        for _ in range(drawn.randint(0, 2)):
            room = not any(link.updates.full for link in trainee.exchange)
            if room and trainee.position < ends[number]:
                trainee.train(min(drawn.randint(1, 3), ends[number] - trainee.position))

    train_to_the_end(job, commit, drawn, workers, train, settles)
    commit(*workers)

    expected = job.world.delta(0, 0, ends[0]) + job.world.delta(1, 0, ends[1])
    assert torch.equal(job.published(), expected)
    for trainee in workers:
        trainee.start()
        trainee.await_versions(job.snapshots(0).version())
        assert torch.equal(trainee.model, expected)
        trainee.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_in_turn_have_every_sample_once_whatever_the_order(
    job: ShardPair, commit: Callable[..., None], seed: int
) -> None:
    """Given two workers that push any parts at any time."""
    drawn, shards = random.Random(seed), range(len(job.nodes))
    workers = [Trainee(job, f"w{number}", number, mapped=seed % 2 == 1) for number in range(2)]
    starts = [dict.fromkeys(shards, 0) for _ in workers]
    ends = [job.world.plan.size(number) for number in range(2)]

    def push(number: int, some: Iterable[int]) -> None:
        trainee, lacks = workers[number], starts[number]
        pushed = {shard: lacks[shard] for shard in some if lacks[shard] < trainee.position}
        trainee.push_parts(pushed)
        lacks.update(dict.fromkeys(pushed, trainee.position))

    def train(number: int) -> None:
        trainee = workers[number]
        trainee.start()
        for _ in range(min(drawn.randint(1, 2), ends[number] - trainee.position)):
            trainee.step()
        room = [each for each in shards if not trainee.exchange[each].updates.full]
        push(number, drawn.sample(room, drawn.randint(0, len(room))))

    train_to_the_end(job, commit, drawn, workers, train, settles_beside)
    for number, trainee in enumerate(workers):
        await_truth(partial(settles_beside, trainee))
        trainee.start()
        push(number, shards)
    commit(*workers)
    commit(*workers)

    expected = job.world.delta(0, 0, ends[0]) + job.world.delta(1, 0, ends[1])
    assert torch.equal(job.published(), expected)
    for trainee in workers:
        await_truth(partial(is_at, trainee, expected))
        trainee.close()


def settles_beside(trainee: Trainee) -> bool:
    trainee.follow()
    trainee.exchange.settle_beside()
    return not any(link.updates.full for link in trainee.exchange)


def is_at(trainee: Trainee, expected: torch.Tensor) -> bool:
    trainee.follow()
    return torch.equal(trainee.model, expected)


def test_an_interval_that_fails_between_two_turns_is_trained_again(
    job: ShardPair, worker: Trainee, commit: Callable[..., None]
) -> None:
    # Given a copy whose second interval was pushed to one shard only
    worker.train(1)
    worker.start()
    worker.step()
    worker.push_parts({0: 1})
    worker.start()
    worker.step()

    # When the third one fails, and the worker starts over from what the shards have
    assert worker.exchange.unpushed == (len(job.nodes) > 1)
    worker.exchange.drop_copy()
    commit(worker)
    starts = worker.exchange.begin(0, 0, job.world.plan.size(0), 1)
    worker.exchange.refresh(again=True)
    worker.position = min(starts)
    worker.start()
    worker.step()
    worker.push_parts({shard: at for shard, at in enumerate(starts) if at < worker.position})
    commit(worker)

    assert torch.equal(job.published(), job.world.delta(0, 0, worker.position))


def settles(trainee: Trainee) -> bool:
    trainee.follow()
    trainee.exchange.settle()
    return not any(link.updates.full for link in trainee.exchange)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_lossy_encoding_keeps_the_model_within_its_residual(
    make_pair: MakePair, mapped: bool
) -> None:
    with make_pair(1, samples=3000, update=COARSE) as job:
        worker, server = Trainee(job, "w", 0, mapped=mapped), job.shard(0)
        for number in range(1, 4):
            worker.train(5)
            assert worker.exchange.flush(PATIENCE)
            server.turn()
            worker.await_versions(number)
        assert torch.equal(job.published()[:3000].round(), job.world.delta(0, 0, 15)[:3000])
        worker.close()


def test_the_parts_of_a_copy_have_only_pieces_of_their_vectors() -> None:
    """All shards merge beside the training, so whole vectors of some would be much of the model."""
    floats = 8 << 20
    own = OwnPart(
        ShardRange(0, 0, floats, floats - 1), MappedVector(floats), torch.device("cpu"), mapped=True
    )
    end, version = own.lend(), MappedVector(floats)
    end.memory[floats - 2 :].copy_(torch.tensor([3.0, 5.0]))

    def move() -> None:
        difference = own.advance(end, 1)
        assert difference.compute()[floats - 2 :].tolist() == [3, 5]
        own.merge(version, 0, done)
        shift = own.take_shift(wait=True)
        assert shift is not None
        assert shift.memory[floats - 2 :].tolist() == [0, 0]

    assert memory_of(move) < floats * 4 / 2


def done(compute: Callable[[], Moved]) -> Future[Moved]:
    future: Future[Moved] = Future()
    future.set_result(compute())
    return future
