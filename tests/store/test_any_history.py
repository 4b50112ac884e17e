"""Any history of workers, parameter servers and lost servers, against a simple model.

The model: a snapshot is a list of intervals that were applied, and the vector is their sum.
Whatever happens, the vector equals the record beside it, and when everybody has done his work
each sample of each epoch is in there exactly once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from servers import running_server, url_of
from world import Volunteer, World, run_to_end

from vcasgd.errors import Fenced, SnapshotMissing
from vcasgd.runtime.shard import Shard
from vcasgd.store.connection import Client, connect
from vcasgd.store.leases import Lease

WORKERS = ("ann", "bob", "cyd")


class History(RuleBasedStateMachine):
    """One job of 2 epochs, 3 subtasks each, 4 samples each."""

    ledger: ClassVar[Client]
    tensors: ClassVar[Client]

    leases: Bundle[tuple[str, Lease]] = Bundle("leases")
    pushed: Bundle[tuple[str, Lease, int, int]] = Bundle("pushed")

    @initialize()
    def submit(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(self.ledger, self.tensors, Path(self.folder.name))
        self.shard = self.world.shard()
        self.shard.turn()
        self.world.checkpoint()
        self.volunteers = {name: Volunteer(self.world, name, interval=3) for name in WORKERS}
        self.zombies: list[Shard] = []
        self.applied = 0

    # -- workers ------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS), rounds=st.integers(1, 4))
    def work(self, worker: str, rounds: int) -> None:
        """Honestly, whatever happened meanwhile to its leases and updates."""
        for _ in range(rounds):
            self.volunteers[worker].step()
            self.shard.turn()

    @rule(target=leases, worker=st.sampled_from(WORKERS), number=st.integers(1, 3))
    def acquire(self, worker: str, number: int) -> Any:
        answers = [self.world.leases(worker).acquire() for _ in range(number)]
        return multiple(
            *(
                (worker, each)
                for each in answers
                if isinstance(each, Lease) and each.kind == "train"
            )
        )

    @rule(lease=consumes(leases))
    def give_back(self, lease: tuple[str, Lease]) -> None:
        self.world.leases(lease[0]).release(lease[1])

    @rule()
    def time_passes(self) -> None:
        """Long enough for every lease. Who held one is a zombie from now on."""
        self.world.expire()

    @rule(target=pushed, lease=leases, lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def push_some(self, lease: tuple[str, Lease], lengths: list[int]) -> Any:
        """From where the subtask stands, as an honest worker does; also from a lost lease."""
        worker, held = lease
        plan, done = self.world.plan, []
        size, epoch = plan.size(held.number), plan.epoch_of(held.number)
        for length in lengths:
            try:
                start = self.world.sender.begin(held.number, epoch, size, held.token)
            except Fenced:
                break
            if start < size:
                stop = min(size, start + length)
                _, answer = self.world.push(held.number, start, stop, held.token, worker=worker)
                assert answer.accepted, "nobody else pushed in between"
                done.append((worker, held, start, stop))
        return multiple(*done)

    @rule(push=pushed)
    def push_again(self, push: tuple[str, Lease, int, int]) -> None:
        """What was pushed before, under another name: a worker that lost its memory, or one
        that was asleep. It is taken only where it continues."""
        worker, held, start, stop = push
        with suppress(Fenced):
            self.world.push(held.number, start, stop, held.token, worker=worker)

    @rule(push=pushed)
    def smuggle(self, push: tuple[str, Lease, int, int]) -> None:
        """Past the script: only the parameter server is left to notice."""
        worker, held, start, stop = push
        header, payload = self.world.update(held.number, start, stop, held.token, worker=worker)
        self.world.smuggle(header, bytes(payload))

    @rule(
        subtask=st.integers(0, 6),
        bounds=st.tuples(st.integers(0, 4), st.integers(0, 5)),
        damage=st.sampled_from([{"checksum": 1}, {"layout": "x"}, {"integers": ""}, {}]),
    )
    def vandalise(self, subtask: int, bounds: tuple[int, int], damage: dict[str, Any]) -> None:
        header, payload = self.world.update(
            subtask, *bounds, token=10**6, worker="vandal", **(damage or {"codec": "bfloat16"})
        )
        self.world.smuggle(header, bytes(payload))

    # -- parameter servers --------------------------------------------------------------------

    @rule()
    def turn(self) -> None:
        self.shard.turn()

    @rule()
    def another_server_takes_over(self) -> None:
        self.zombies.append(self.shard)
        self.shard = self.world.shard()
        self.shard.turn()

    @precondition(lambda self: self.zombies)
    @rule(worker=st.sampled_from(WORKERS))
    def a_zombie_wakes_up(self, worker: str) -> None:
        """It finds out sooner or later, and changes nothing until then."""
        zombie = self.zombies.pop()
        self.volunteers[worker].step()
        before = self.seen()
        with suppress(Fenced):
            zombie.turn()
        assert self.seen() == before

    @rule()
    def pin(self) -> None:
        self.world.snapshots.want_pin("periodic")
        self.shard.turn()

    @rule()
    def unpin(self) -> None:
        self.world.snapshots.unpin("periodic")

    # -- servers that are lost ----------------------------------------------------------------

    @rule()
    def the_tensors_server_comes_back_empty(self) -> None:
        self.shard.turn()  # it has loaded, and nothing is between it and what is published
        self.world.lose_tensors()
        with pytest.raises(SnapshotMissing):
            self.world.snapshots.read()
        self.shard.turn()

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @rule()
    def both_are_lost(self) -> None:
        self.world.lose_tensors()
        self.zombies.clear()  # of another machine, it is gone with it
        self.shard = self.world.shard()
        self.shard.turn()
        self.applied = 0

    # -- what always holds --------------------------------------------------------------------

    def seen(self) -> tuple[object, ...]:
        """What anybody can see of the job, but for entries that nobody took yet."""
        out = torch.empty(self.world.layout.floats)
        snapshot = self.world.snapshots.fetch(out)
        return snapshot.meta.version, snapshot.record, out.tolist()

    @invariant()
    def the_vector_is_what_the_record_says(self) -> None:
        self.world.assert_exact()

    @invariant()
    def nothing_applied_is_forgotten(self) -> None:
        record = self.world.snapshots.read().record
        applied = record.finished * self.world.plan.samples + sum(record.positions.values())
        assert applied >= self.applied
        self.applied = applied

    @invariant()
    def every_pinned_snapshot_is_whole(self) -> None:
        for name, pin in self.world.snapshots.pins().items():
            _, floats = self.world.snapshots.fetch_pinned(name)
            assert floats[: self.world.plan.samples].tolist() == self.world.recorded(pin.record)

    @invariant()
    def nobody_honest_is_blamed(self) -> None:
        assert self.world.jobs.quarantined(self.world.job).keys() <= {"vandal"}

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        with self.folder:
            self.shard.turn()
            self.world.partition().assert_whole()
            self.world.expire()
            last = Volunteer(self.world, "last")
            run_to_end(self.world, [last], self.shard.turn)
            last.step()
            job = self.world.jobs.get(self.world.job)
            assert [each.epoch for each in job.evaluations] == [1, 2]
            assert job.totals["samples"] == 2 * self.world.plan.samples
            assert job.totals["repeated"] == 0


@contextmanager
def servers(folder: Path) -> Iterator[None]:
    with running_server("valkey", folder) as server:
        History.ledger, History.tensors = connect(url_of(server, 0)), connect(url_of(server, 1))
        yield
        History.ledger.close()
        History.tensors.close()


def test_any_history(tmp_path: Path) -> None:
    with servers(tmp_path):
        run_state_machine_as_test(
            History,
            settings=settings(
                max_examples=30,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
