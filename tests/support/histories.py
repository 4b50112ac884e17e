"""Generated histories of workers, parameter servers and lost servers, against a simple model.

In the model, a snapshot is a list of applied intervals, and the vector is their sum. The vector
always matches the applied record, and after all work it contains each sample of each epoch exactly
once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
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
)

from support.harness import RedisServer
from support.honest_workers import HonestWorker, run_to_end
from support.servers import Fault, Moment, running_server, through_proxy
from support.world import World
from vcasgd.errors import Fenced, SnapshotMissing, StoreUnavailable
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.leases import Lease, LostWorkers
from vcasgd.store.tensors.updates import PushResult, UpdateSender

WORKERS = ("ann", "bob", "cyd")
#: Errors of a server that is unavailable or came back empty; processes retry after them.
RETRIED = (StoreUnavailable, SnapshotMissing)
#: Calls until all broken connections to a dead server were detected.
MAX_CALLS = 10
REPLACED = "a replaced parameter server changes nothing"

#: A publishing turn has about this many commands.
commands = st.integers(1, 24)
moments = st.sampled_from(["before", "after"])


class FaultyServers:
    """Two servers, with faulty connections for parameter servers and some pushes."""

    def __init__(self, ledger: RedisServer, tensors: RedisServer, fault: Fault) -> None:
        self.ledger_server, self.tensors_server = ledger, tensors
        self.ledger, self.tensors = ledger.client(), tensors.client()
        self._fault = fault
        self.proxied_ledger: RedisClient
        self.proxied_tensors: RedisClient

    def restart(self, server: RedisServer) -> None:
        """Kill and restart a server, and drop all connections."""
        server.kill()
        server.start()
        for client in (self.ledger, self.tensors):
            client.connection_pool.disconnect(inuse_connections=False)

    @contextmanager
    def failing(
        self, at: int, moment: Moment, instead: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Fail once, at the ``at``-th command, by a cut or by calling ``instead``.

        Errors of ``instead``, which runs in the proxy's thread, are raised here.
        """
        fault, wrong = self._fault, []

        def guarded() -> None:
            try:
                if instead is not None:
                    instead()
            except BaseException as error:  # noqa: BLE001 - raised below
                wrong.append(error)

        fault.at, fault.moment = at, moment
        fault.instead = guarded if instead is not None else None
        fault.arm()
        try:
            yield
        finally:
            fault.disarm()
        if wrong:
            raise wrong[0]


@contextmanager
def faulty_servers(kind: str, folder: Path) -> Iterator[FaultyServers]:
    """Run servers of one kind for all histories."""
    fault = Fault(0)
    with (
        running_server(kind, folder / "ledger", durable=True) as ledger,
        running_server(kind, folder / "tensors") as tensors,
        through_proxy(ledger, 0, fault) as proxied_ledger,
        through_proxy(tensors, 0, fault) as proxied_tensors,
    ):
        servers = FaultyServers(ledger, tensors, fault)
        servers.proxied_ledger, servers.proxied_tensors = proxied_ledger, proxied_tensors
        yield servers
        servers.ledger.close()
        servers.tensors.close()


class History(RuleBasedStateMachine):
    """One job of 2 epochs, 3 subtasks each, 4 samples each; or it ends within its last epoch."""

    servers: ClassVar[FaultyServers]
    #: True if each history runs to the end of the job.
    runs_to_end: ClassVar[bool] = True

    leases: Bundle[tuple[str, Lease]] = Bundle("leases")
    pushed: Bundle[tuple[str, Lease, int, int]] = Bundle("pushed")

    @initialize(
        target=leases,
        length=st.sampled_from([{"epochs": 2}, {"max_samples": 19}, {"max_steps": 7}]),
    )
    def submit(self, length: dict[str, int]) -> Any:
        self.violated = False
        self.folder = tempfile.TemporaryDirectory()
        self.servers.tensors.flushall()
        # Loading a script takes commands of its own, and a repeated history must have the same.
        for server in (self.servers.ledger, self.servers.tensors):
            server.script_flush()
        self.world = World(
            self.servers.ledger, self.servers.tensors, Path(self.folder.name), **length
        )
        self.sender = UpdateSender(self.servers.proxied_tensors, self.world.keys)
        self.shard = self.new_shard()
        self.serve()
        self.world.checkpoint()
        self.workers = {name: HonestWorker(self.world, name, interval=3) for name in WORKERS}
        self.zombies: list[Shard] = []
        self.applied = 0
        return multiple(*(self.acquire_leases("ann", 1) + self.acquire_leases("bob", 1)))

    # -- workers ------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS), rounds=st.integers(1, 4))
    def work(self, worker: str, rounds: int) -> None:
        """Let an honest worker continue, whatever happened to its leases and updates."""
        for _ in range(rounds):
            self.workers[worker].step()
            self.serve()

    @rule(target=leases, worker=st.sampled_from(WORKERS), number=st.integers(1, 3))
    def acquire(self, worker: str, number: int) -> Any:
        return multiple(*self.acquire_leases(worker, number))

    @rule(lease=consumes(leases))
    def give_back(self, lease: tuple[str, Lease]) -> None:
        self.world.leases(lease[0]).release(lease[1])

    @rule()
    def time_passes(self) -> None:
        """Let all leases expire; their holders are zombies from now on."""
        self.world.expire()

    @rule(workers=st.sets(st.sampled_from(WORKERS)))
    def workers_are_reported_lost(self, workers: set[str]) -> None:
        """Free the leases of workers that may be alive and train on."""
        LostWorkers(self.world.ledger).report({self.world.job: workers})

    @rule(target=pushed, lease=leases, lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def push_some(self, lease: tuple[str, Lease], lengths: list[int]) -> Any:
        """Push from the subtask's position, as an honest worker does, even with a lost lease."""
        worker, held = lease
        done = []
        for length in lengths:
            start = self.begin(held)
            if start is None:
                break
            size = self.world.plan.size(held.number)
            if start < size:
                stop = min(size, start + length)
                _, answer = self.world.push(held.number, start, stop, held.token, worker=worker)
                self.require(answer.accepted, "no other worker pushed in between")
                done.append((worker, held, start, stop))
        return multiple(*done)

    @rule(target=pushed, lease=leases, at=st.integers(1, 6), moment=moments)
    def push_and_lose_the_answer(self, lease: tuple[str, Lease], at: int, moment: Moment) -> Any:
        """Break the connection at any command of a push, and repeat the push."""
        worker, held = lease
        start, size = self.begin(held), self.world.plan.size(held.number)
        if start is None or start == size:
            return multiple()
        epoch = self.world.plan.epoch_of(held.number)
        header, payload = self.world.update(held.number, start, size, held.token, worker=worker)
        with self.servers.failing(at, moment), suppress(StoreUnavailable):
            self.sender.push(header, epoch, payload)
        for _ in range(2):
            answer = self.retry(lambda: self.sender.push(header, epoch, payload))
            self.require(answer == PushResult(True, size), "a repeated push is recognized")
        self.push_and_check(worker, held, start, size)  # refused under another name
        return (worker, held, start, size)

    @rule(lease=leases)
    def wake_up_and_push(self, lease: tuple[str, Lease]) -> None:
        """Push at the position without `begin`; a stale lease must be refused."""
        worker, held = lease
        start, size = self.position_of(held.number), self.world.plan.size(held.number)
        if start is not None and start < size:
            self.push_and_check(worker, held, start, size)

    @rule(lease=leases, worker=st.sampled_from(WORKERS))
    def sleep_through_a_lease(self, lease: tuple[str, Lease], worker: str) -> None:
        """Let another worker lease and begin the subtask before the sleeper wakes up."""
        held = lease[1]
        self.world.expire(f"train:{held.number}")
        newer = self.world.leases(worker).acquire()
        if isinstance(newer, Lease) and newer.kind == "train":
            self.begin(newer)
        self.wake_up_and_push(lease)

    @rule(push=pushed)
    def push_again(self, push: tuple[str, Lease, int, int]) -> None:
        """Push the same samples under another name, as a restarted or late worker does.

        The update is accepted only at the subtask's position.
        """
        self.push_and_check(*push)

    @rule(push=pushed)
    def inject(self, push: tuple[str, Lease, int, int]) -> None:
        """Bypass the script, so that only the parameter server can refuse the update."""
        worker, held, start, stop = push
        header, payload = self.world.update(held.number, start, stop, held.token, worker=worker)
        self.world.inject(header, bytes(payload))

    @rule(
        subtask=st.integers(0, 6),
        bounds=st.tuples(st.integers(0, 4), st.integers(0, 5)),
        damage=st.sampled_from([{"checksum": 1}, {"layout": "x"}, {"integers": ""}, {}]),
    )
    def vandalise(self, subtask: int, bounds: tuple[int, int], damage: dict[str, Any]) -> None:
        header, payload = self.world.update(
            subtask, *bounds, token=10**6, worker="vandal", **(damage or {"codec": "bfloat16"})
        )
        self.world.inject(header, bytes(payload))

    @rule(lease=leases)
    def push_and_take_the_chunks_back(self, lease: tuple[str, Lease]) -> None:
        """Delete the chunks of a pushed update; later updates are refused and trained again."""
        held = lease[1]
        start, size = self.begin(held), self.world.plan.size(held.number)
        if start is not None and start < size:
            header, _ = self.world.push(held.number, start, size, held.token, worker="vandal")
            self.servers.tensors.delete(self.world.keys.payload_chunk(header.update, 0))

    # -- parameter servers --------------------------------------------------------------------

    @rule()
    def turn(self) -> None:
        self.serve()

    @rule(at=commands, moment=moments, dies=st.booleans())
    def turn_is_cut_off(self, at: int, moment: Moment, dies: bool) -> None:
        """Interrupt a turn at any command; the same server or a successor continues."""
        with self.servers.failing(at, moment), suppress(*RETRIED):
            self.shard.turn()
        if dies:
            self.shard = self.new_shard()
        self.serve()

    @rule()
    def another_server_takes_over(self) -> None:
        self.zombies.append(self.shard)
        self.shard = self.new_shard()
        self.serve()

    @rule(at=commands, worker=st.sampled_from(WORKERS), works=st.booleans())
    def frozen_in_the_middle_of_a_turn(self, at: int, worker: str, works: bool) -> None:
        """Freeze a server before a command; another one takes over and may work meanwhile."""
        frozen, states = self.shard, []
        self.workers[worker].step()  # provides an update to publish

        def meanwhile() -> None:
            token = self.world.new_token()
            self.shard = self.new_shard(token)
            self.world.snapshots.takeover(token)
            if works:
                self.serve()
                self.workers[worker].step()
                self.serve()
            states.append(self.visible_state())

        with self.servers.failing(at, "before", meanwhile), suppress(Fenced, *RETRIED):
            frozen.turn()
        if self.shard is not frozen:
            self.require(states == [self.visible_state()], REPLACED)
            self.zombies.append(frozen)

    @precondition(lambda self: self.zombies)
    @rule(worker=st.sampled_from(WORKERS))
    def a_zombie_wakes_up(self, worker: str) -> None:
        """Let a replaced server continue; it changes nothing before it is fenced."""
        zombie = self.zombies.pop()
        self.workers[worker].step()
        before = self.visible_state()
        with suppress(Fenced):
            self.retry(zombie.turn)
        self.require(self.visible_state() == before, REPLACED)

    @rule()
    def pin(self) -> None:
        self.world.snapshots.request_pin("periodic")
        self.serve()

    @rule()
    def unpin(self) -> None:
        self.world.snapshots.unpin("periodic")

    # -- servers that are lost ----------------------------------------------------------------

    @rule()
    def the_tensors_server_is_killed(self) -> None:
        self.serve()  # all its work is published
        self.servers.restart(self.servers.tensors_server)
        with suppress(SnapshotMissing):
            self.world.snapshots.read()
            self.require(False, "a server without a file restarts empty")
        self.serve()

    @rule(at=commands, moment=moments)
    def the_tensors_server_comes_back_empty_in_the_middle_of_a_turn(
        self, at: int, moment: Moment
    ) -> None:
        self.serve()
        with self.servers.failing(at, moment, self.world.lose_tensors), suppress(*RETRIED):
            self.shard.turn()
        self.serve()

    @rule()
    def the_ledger_is_killed(self) -> None:
        """Restart the ledger, which keeps all acknowledged writes."""
        self.servers.restart(self.servers.ledger_server)

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @rule()
    def both_are_lost(self) -> None:
        self.world.lose_tensors()
        self.zombies.clear()  # they are lost with the machine
        self.shard = self.new_shard()
        self.serve()
        self.applied = 0

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def the_vector_is_what_the_record_says(self) -> None:
        self.visible_state()
        with self.recording_violations():
            self.world.assert_exact()

    @invariant()
    def nothing_applied_is_forgotten(self) -> None:
        record = self.world.snapshots.read().record
        plan = self.world.plan
        applied = record.applied(plan).samples_applied
        self.require(applied >= self.applied, "no applied update is lost")
        self.applied = applied

    @invariant()
    def every_pinned_snapshot_is_whole(self) -> None:
        for name, pin in self.world.snapshots.pins().items():
            _, floats = self.world.snapshots.fetch_pinned(name)
            counts = floats[: self.world.plan.samples].tolist()
            expected = self.world.expected_counts(pin.record)
            self.require(counts == expected, "a pinned snapshot matches its record")

    @invariant()
    def no_honest_worker_is_blamed(self) -> None:
        blamed = self.world.jobs.workers.quarantined(self.world.job).keys()
        self.require(blamed <= {"vandal"}, "no honest worker is blamed")

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        with self.folder:
            if self.violated or not self.runs_to_end:
                return
            self.serve()
            self.world.partition().assert_whole()
            self.world.expire()
            last = HonestWorker(self.world, "last")
            run_to_end(self.world, [last], self.serve)
            last.step()
            job = self.world.jobs.get(self.world.job)
            assert [each.number for each in job.evaluations] == [1, 2]
            assert job.totals["samples"] == self.world.plan.total_samples
            assert job.totals["repeated"] == 0

    # -- helpers -----------------------------------------------------------------------------

    def require(self, condition: bool, what: str) -> None:
        with self.recording_violations():
            assert condition, what

    @contextmanager
    def recording_violations(self) -> Iterator[None]:
        """Record a violation; the job then need not run to its end."""
        try:
            yield
        except AssertionError:
            self.violated = True
            raise

    def new_shard(self, token: int | None = None) -> Shard:
        return self.world.shard(
            token, ledger=self.servers.proxied_ledger, tensors=self.servers.proxied_tensors
        )

    def serve(self) -> None:
        """Run a turn of the newest parameter server."""
        with self.recording_violations():
            try:
                self.retry(self.shard.turn)
            except Fenced as error:
                raise AssertionError(f"{REPLACED}: the newest one met {error}") from error

    def retry(self, call: Callable[[], Any]) -> Any:
        for _ in range(MAX_CALLS):
            with suppress(*RETRIED):
                return call()
        raise AssertionError("the server never came back")

    def acquire_leases(self, worker: str, number: int) -> list[tuple[str, Lease]]:
        """Return the training leases that a number of attempts granted."""
        answers = [self.world.leases(worker).acquire() for _ in range(number)]
        return [
            (worker, each) for each in answers if isinstance(each, Lease) and each.kind == "train"
        ]

    def begin(self, held: Lease) -> int | None:
        """Return the sample to train a subtask from; None for a stale lease."""
        plan = self.world.plan
        with suppress(Fenced):
            return self.world.sender.begin(
                held.number, plan.epoch_of(held.number), plan.size(held.number), held.token
            )
        return None

    def position_of(self, subtask: int) -> int | None:
        """Return a subtask's position, including waiting updates; None if it is done."""
        record = self.world.snapshots.read().record.applied(self.world.plan)
        if record.is_done(subtask):
            return None
        waits = self.servers.tensors.hget(self.world.keys.pushed, str(subtask)) or b"0|"
        return max(record.position(subtask), int(waits.split(b"|")[0]))

    def push_and_check(self, worker: str, held: Lease, start: int, stop: int) -> None:
        """Push; only an update with the newest lease at the position must be accepted."""
        newest = int(self.servers.tensors.hget(self.world.keys.tokens, str(held.number)) or 0)
        expected = newest <= held.token and self.position_of(held.number) == start
        accepted = False
        with suppress(Fenced):
            _, answer = self.world.push(held.number, start, stop, held.token, worker=worker)
            accepted = answer.accepted
        self.require(accepted <= (newest <= held.token), "a stale lease pushes nothing")
        self.require(accepted == expected, "a push is accepted where it continues its subtask")

    def visible_state(self) -> tuple[object, ...]:
        """Return the visible state of the job, without waiting updates."""
        out = torch.empty(self.world.layout.floats)
        with self.recording_violations():
            try:
                snapshot = self.world.snapshots.fetch(out)
            except StoreUnavailable as error:
                raise AssertionError(f"{REPLACED}: {error}") from error
        return snapshot.meta.version, snapshot.record, out.tolist()
