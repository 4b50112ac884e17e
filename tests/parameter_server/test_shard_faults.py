"""Faults at each command of a parameter server lose, repeat and leave behind nothing.

Each scenario is repeated with the fault one command later, until it no longer
fires. The final vector says how often each sample was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest
import torch
from support.exact import counts_after
from support.harness import RedisServer
from support.honest_workers import HonestWorker, run_to_end
from support.servers import Fault, Moment, through_proxy
from support.world import MakeWorld, World

from vcasgd.errors import Fenced, SnapshotMissing, StoreUnavailable
from vcasgd.parameter_server import reports
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.connection import RedisClient

#: More commands than in any scenario; bounds a test whose fault never fires.
MAX_COMMANDS = 400


class FaultyShard:
    """A job whose parameter server has breakable connections."""

    def __init__(
        self, world: World, fault: Fault, ledger: RedisClient, tensors: RedisClient
    ) -> None:
        self.world = world
        self.fault = fault
        self._ledger, self._tensors = ledger, tensors
        self.shard = self.new_shard()
        self.cuts = 0

    def new_shard(self) -> Shard:
        return self.world.shard(ledger=self._ledger, tensors=self._tensors)

    def turn_or_die(self) -> None:
        """Kill the process at the fault; a successor takes over."""
        try:
            self.shard.turn()
        except (StoreUnavailable, SnapshotMissing):
            self.cuts += 1
            self.shard = self.new_shard()

    def turn_or_wait(self) -> None:
        """Let the process survive the fault and retry."""
        try:
            self.shard.turn()
        except (StoreUnavailable, SnapshotMissing):
            self.cuts += 1

    def play(self, turn: Callable[[], None]) -> None:
        """A short job with a damaged update, a pin and the fault."""
        world, worker = self.world, HonestWorker(self.world, "a", interval=3)
        header, payload = world.update(1, 0, 2, 1, checksum=1, worker="b")
        world.inject(header, payload)
        world.snapshots.request_pin("periodic")
        self.fault.arm()
        for _ in range(2):
            worker.step()
            turn()
        world.snapshots.unpin("periodic")
        run_to_end(world, [worker], turn, rounds=40)
        self.fault.disarm()
        self.assert_settled()

    def assert_settled(self) -> None:
        """Check that all work is applied once and nothing else remains."""
        world = self.world
        world.assert_exact()
        for name in world.snapshots.pins():
            world.snapshots.unpin(name)
        self.shard.turn()
        job, present = world.jobs.get(world.job), world.snapshots.read().meta
        assert job.version == present.version
        assert job.totals["applied"] == world.plan.samples * world.spec.epochs
        assert job.totals["repeated"] == 0
        assert world.jobs.workers.quarantined(world.job) == {}
        # the present snapshot, and the previous one for its readers
        chunks = {key for key in world.tensor_keys() if key.startswith(("s:", "u:"))}
        newest = f"s:{present.version}.{present.token}:0"
        assert newest in chunks
        assert len(chunks) <= 2, f"left behind: {chunks - {newest}}"
        assert world.reader.waiting() == 0


Build = Callable[[Fault], AbstractContextManager[FaultyShard]]
Turn = Callable[[FaultyShard], None]


@pytest.fixture
def build(server: RedisServer, make_world: MakeWorld) -> Build:
    @contextmanager
    def build_shard(fault: Fault) -> Iterator[FaultyShard]:
        world = make_world(samples=9, epochs=2, subtasks_per_epoch=2)
        with through_proxy(server, 0, fault) as ledger, through_proxy(server, 1, fault) as tensors:
            yield FaultyShard(world, fault, ledger, tensors)

    return build_shard


def at_each_command(
    moment: Moment, play: Callable[[Fault], None], *, shortest: int = 40, every: int = 1
) -> None:
    for at in range(1, MAX_COMMANDS, every):
        fault = Fault(at, moment)
        try:
            play(fault)
        except BaseException as error:
            error.add_note(f"the fault was {moment} command {at}: {fault.cut[:300]!r}")
            raise
        if not fault.fired:
            assert at > shortest, "the scenario is shorter than any job"
            return
    pytest.fail("the scenario never ends")


@pytest.mark.parametrize(
    ("turn", "moment"),
    [
        pytest.param(FaultyShard.turn_or_die, "before", marks=pytest.mark.extended),
        (FaultyShard.turn_or_die, "after"),
        pytest.param(FaultyShard.turn_or_wait, "before", marks=pytest.mark.ci),
        pytest.param(FaultyShard.turn_or_wait, "after", marks=pytest.mark.extended),
    ],
)
def test_killed_or_disconnected_at_any_command(
    build: Build, turn: Turn, moment: Moment, request: pytest.FixtureRequest
) -> None:
    """With ``--extended`` at each command, otherwise at each third one."""

    def play(fault: Fault) -> None:
        with build(fault) as each:
            each.play(lambda: turn(each))
            assert each.cuts == fault.fired

    every = 1 if request.config.getoption("--extended") else 3
    at_each_command(moment, play, every=every)


@pytest.mark.ci
def test_the_tensors_server_comes_back_empty_at_any_command(build: Build) -> None:
    def play(fault: Fault) -> None:
        with build(fault) as each:
            each.shard.turn()  # from now on the model is in its memory
            fault.instead = each.world.lose_tensors
            each.play(each.turn_or_wait)

    at_each_command("before", play)


def test_a_server_that_wakes_up_replaced_leaves_nothing_behind(build: Build) -> None:
    """It is suspended at any command of a turn, until another server has published."""

    def play(fault: Fault) -> None:
        with build(fault) as each:
            world, replacing = each.world, each.world.shard()
            each.shard.turn()
            world.push(0, 0, 2)

            def replace() -> None:
                replacing.turn()
                world.apply(replacing, 0, 2, 3)

            fault.instead = replace
            fault.arm()
            with suppress(Fenced):
                each.shard.turn()
            fault.disarm()

            present = world.snapshots.read().meta
            chunks = {f"s:{present.version}.{present.token}:0"}
            if fault.fired:
                # For its readers, the previous one stays.
                assert len(world.tensor_keys("s:") - chunks) == 1

    at_each_command("before", play, shortest=5)


@pytest.mark.ci
def test_both_are_lost_at_any_command(build: Build) -> None:
    """The tensors server comes back empty while the parameter server is killed; the last
    checkpoint, from the very beginning, takes their place."""

    def play(fault: Fault) -> None:
        with build(fault) as each:
            each.shard.turn()
            each.world.checkpoint()
            killed: list[Shard] = []

            def lose_both() -> None:
                each.world.lose_tensors()
                killed.append(each.shard)

            def turn() -> None:
                each.turn_or_wait()
                if killed and killed[0] is each.shard:
                    each.shard = each.new_shard()

            fault.instead = lose_both
            each.play(turn)

    at_each_command("before", play)


@pytest.mark.ci
class TestRollback:
    """The model goes back to an earlier one, once, whatever happens meanwhile."""

    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reports, "TUNED_SECONDS", 0.0)

    @pytest.mark.parametrize("turn", [FaultyShard.turn_or_die, FaultyShard.turn_or_wait])
    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_killed_or_disconnected_at_any_command(
        self, build: Build, turn: Turn, moment: Moment
    ) -> None:
        at_each_command(moment, lambda fault: self.play(build, fault, turn), shortest=20)

    def test_the_tensors_server_comes_back_empty_at_any_command(self, build: Build) -> None:
        def play(fault: Fault) -> None:
            self.play(build, fault, FaultyShard.turn_or_wait, empty=True)

        at_each_command("before", play, shortest=20)

    def play(
        self,
        build: Build,
        fault: Fault,
        turn: Turn,
        *,
        empty: bool = False,
    ) -> None:
        with build(fault) as each:
            world = each.world
            # Given a checkpoint, an update after it, and one that waits
            world.push(0, 0, 2)
            each.shard.turn()
            stored = world.checkpoint()
            world.push(0, 2, 4)
            each.shard.turn()
            world.push(1, 0, 2)
            if empty:
                fault.instead = world.lose_tensors

            assert world.jobs.roll_back(world.job, 1, stored.name, "diverged")
            fault.arm()
            while world.rollbacks() < 1:
                turn(each)
            turn(each)
            fault.disarm()
            each.shard.turn()

            # Then it has the samples of the checkpoint, and the record those of all updates
            snapshot = world.snapshots.read()
            # The waiting update is applied if the server didn't know of the rollback yet.
            positions = world.positions(snapshot.record)
            assert positions in ({0: 4}, {0: 4, 1: 2})
            kept = world.delta(0, 0, 2)[: world.plan.samples]
            assert world.counts() == kept.tolist()
            assert snapshot.meta.totals.samples == sum(positions.values())

            # and training continues with all other samples
            worker = HonestWorker(world, "a", interval=3)
            lost = torch.tensor(world.expected_counts(snapshot.record)) - kept
            while not world.complete:
                worker.step()
                each.shard.turn()
            each.shard.turn()
            expected = torch.tensor(counts_after(world.plan, world.plan.epochs)) - lost
            assert world.counts() == expected.tolist()
            assert world.rollbacks() == 1
            assert world.jobs.get(world.job).totals["repeated"] == 0
            assert world.jobs.workers.quarantined(world.job) == {}
