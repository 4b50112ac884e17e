"""Leases of work items: order, expiry, renewal, and results."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import PATIENCE, await_truth
from support.world import RESULT, MakeWorld, World, lease_of

from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.leases import Lease, Leases, LostWorkers, Wait, WorkKind

#: A lease that doesn't expire during a test.
HOUR = 3600.0


def pieces(leases: Leases, most: int = 100) -> list[str]:
    """Lease every available work item, and return their names in order."""
    taken: list[str] = []
    while len(taken) < most and isinstance(answer := leases.acquire(), Lease):
        taken.append(answer.piece)
    return taken


class TestAcquire:
    def test_the_first_snapshot_comes_first_and_only_once(self, make_world: MakeWorld) -> None:
        world = make_world(running=False)

        first, second = world.leases("a").acquire(), world.leases("b").acquire()

        assert lease_of(first).piece == "initialise:0"
        assert second == Wait("starting")
        assert world.leases("a").release(lease_of(first))
        assert lease_of(world.leases("b").acquire()).kind is WorkKind.INITIALISE

    def test_subtasks_in_order_with_growing_tokens(self, world: World) -> None:
        taken = [lease_of(world.leases("a").acquire()) for _ in range(3)]

        assert [lease.number for lease in taken] == [0, 1, 2]
        assert {lease.kind for lease in taken} == {WorkKind.TRAIN}
        assert taken[0].token < taken[1].token < taken[2].token
        assert world.jobs.leases(world.job) == {f"train:{n}": "a" for n in range(3)}

    def test_at_most_the_lead_ahead_of_the_slowest_epoch(self, make_world: MakeWorld) -> None:
        world = make_world(epochs=5, subtasks_per_epoch=2, max_epoch_lead=1)

        # the slowest epoch is 0, so epochs 0 and 1 can be leased
        assert pieces(world.leases("a")) == [f"train:{n}" for n in range(4)]
        assert world.leases("b").acquire() == Wait("epoch lead")

        world.accounts.account(1, 2, 1, "{}", [0, 1])
        assert pieces(world.leases("a")) == ["evaluate:1", "train:4", "train:5"]

    def test_only_so_many_workers_train_at_a_time(self, make_world: MakeWorld) -> None:
        world = make_world(epochs=5, subtasks_per_epoch=8)
        world.jobs.set_plan(world.job, world.facts().points(world.spec), most_workers=2)
        a, b, c = (world.leases(name) for name in "abc")

        held = lease_of(a.acquire()), lease_of(b.acquire())
        assert c.acquire() == Wait("others train the whole batch")
        # Those that train take further subtasks, and the others evaluations.
        assert lease_of(a.acquire()).number == 2
        world.ledger.zadd(LedgerKeys(world.job).open, {"evaluate:1": -1})
        assert lease_of(c.acquire()).piece == "evaluate:1"

        # One that leaves makes room.
        assert b.release(held[1])
        assert lease_of(c.acquire()).number == 1
        assert b.acquire() == Wait("others train the whole batch")

    def test_evaluations_then_returned_subtasks_then_the_next(self, world: World) -> None:
        leases = world.leases("a")
        held = [lease_of(leases.acquire()) for _ in range(5)]
        world.accounts.account(1, 3, 1, "{}", [0, 1, 2])
        leases.release(held[4])
        leases.release(held[3])

        assert pieces(leases) == ["evaluate:1", "train:3", "train:4", "train:5"]

    def test_one_kind_only(self, world: World) -> None:
        leases = world.leases("a")
        assert leases.acquire(WorkKind.EVALUATE) == Wait("no evaluate")
        world.accounts.account(1, 3, 1, "{}", [0, 1, 2])

        assert lease_of(leases.acquire(WorkKind.EVALUATE)).piece == "evaluate:1"
        assert leases.acquire(WorkKind.EVALUATE) == Wait("no evaluate"), (
            "although there is other work"
        )

    def test_eight_concurrent_workers_lease_each_subtask_once(self, make_world: MakeWorld) -> None:
        world = make_world(samples=40, epochs=1, subtasks_per_epoch=40)
        start = threading.Barrier(8)

        def work(index: int) -> list[Lease]:
            leases, taken = world.leases(f"w{index}"), []
            start.wait(PATIENCE)
            while isinstance(answer := leases.acquire(), Lease):
                taken.append(answer)
            return taken

        with ThreadPoolExecutor(8) as pool:
            everything = [lease for taken in pool.map(work, range(8)) for lease in taken]

        assert sorted(lease.number for lease in everything) == list(range(40))
        assert len({lease.token for lease in everything}) == 40
        world.partition().assert_whole()


class TestOvertaking:
    """With one epoch of lead, no worker waits for the oldest lease."""

    def idle_beside(self, world: World, *, first: str = "slow") -> Leases:
        """Lease subtask 0 to a worker, and let another one train all others that it gets."""
        assert lease_of(world.leases(first, HOUR).acquire()).number == 0
        fast = world.leases("fast", HOUR)
        # Applied ones are no longer leased, so that the border is all that is left.
        for number in range(1, 6):
            assert lease_of(fast.acquire()).number == number
        return fast

    def test_an_idle_worker_takes_over_the_oldest_lease(self, world: World) -> None:
        fast = self.idle_beside(world)

        assert isinstance(fast.acquire(), Wait), "its updates may not be applied yet"
        taken = lease_of(fast.acquire(idle=True))

        assert (taken.number, world.jobs.leases(world.job)["train:0"]) == (0, "fast")
        assert world.jobs.work(world.job)["overtaken"] == 1
        assert isinstance(fast.acquire(idle=True), Wait), "its own leases are left"

    def test_not_from_a_worker_that_is_less_than_two_subtasks_behind(self, world: World) -> None:
        fast = self.idle_beside(world, first="gone")
        LostWorkers(world.ledger).report({world.job: ["gone"]})
        assert lease_of(world.leases("new", HOUR).acquire()).number == 0

        assert fast.acquire(idle=True) == Wait("nothing left to lease")

    def test_it_is_not_taken_back(self, world: World) -> None:
        slow = world.leases("slow", HOUR)
        held = [lease_of(slow.acquire()) for _ in range(3)]
        fast = world.leases("fast", HOUR)
        for _ in range(3):
            fast.acquire()

        assert [lease_of(fast.acquire(idle=True)).number for _ in range(3)] == [0, 1, 2]

        assert slow.renew({}, held).lost == {each.piece for each in held}
        assert isinstance(slow.acquire(idle=True), Wait)
        world.partition().assert_whole()


class TestLostWorkers:
    def test_their_leases_are_free_at_once(self, world: World) -> None:
        lost, other = world.leases("lost", HOUR), world.leases("other", HOUR)
        held = [lease_of(lost.acquire()), lease_of(lost.acquire())]
        kept = lease_of(other.acquire())
        report = LostWorkers(world.ledger).report

        assert report({world.job: ["lost", "unknown"]}) == 2
        assert report({world.job: ["lost"]}) == 0

        assert [lease_of(other.acquire()).number for _ in range(2)] == [0, 1]
        # It was alive after all.
        assert lost.renew({}, held).lost == {"train:0", "train:1"}
        assert other.renew({}, [kept]).lost == frozenset()
        world.partition().assert_whole()

    def test_each_reader_gets_each_loss_once(self, world: World) -> None:
        reports, reader = LostWorkers(world.ledger), LostWorkers(world.ledger)
        assert reader.news([]) == reader.news([world.job]) == {}
        reports.report({world.job: ["a", "b"]})

        assert reader.news([world.job, "other"]) == {world.job: {"a", "b"}}
        assert reader.news([world.job]) == {}
        reports.report({world.job: ["b"]})
        assert reader.news([world.job]) == {world.job: {"b"}}
        assert LostWorkers(world.ledger).news([world.job]) == {world.job: {"a", "b"}}

    def test_what_one_job_wrote_keeps_no_lease_of_another_one(self, world: World) -> None:
        # Given a job whose worker claims a subtask with a number that the ledger can't store
        hostile = world.jobs.submit(world.spec, "0" * 64).id
        world.ledger.hset(LedgerKeys(hostile).holders, f"train:{'9' * 400}", "lost|1")
        lease_of(world.leases("lost", HOUR).acquire())

        freed = LostWorkers(world.ledger).report({hostile: ["lost"], world.job: ["lost"]})

        assert freed == 1
        assert lease_of(world.leases("other").acquire()).number == 0

    def test_nothing_is_written_for_a_job_that_is_deleted(self, world: World) -> None:
        assert LostWorkers(world.ledger).report({"deleted": ["a"]}) == 0
        assert not world.ledger.exists(LedgerKeys("deleted").lost)


class TestStates:
    @pytest.mark.parametrize("state", [JobState.PAUSED, JobState.SUCCEEDED, JobState.CANCELLED])
    def test_no_work_in(self, world: World, state: JobState) -> None:
        world.accounts.account(1, 3, 1, "{}", [0, 1, 2])
        world.jobs.transition(world.job, state, [JobState.RUNNING], why="test")

        assert world.leases("a").acquire() == Wait(state.value)

    def test_a_finishing_job_leases_only_evaluations(self, world: World) -> None:
        held = lease_of(world.leases("a").acquire())
        world.accounts.account(1, 3, 1, "{}", [1, 2])
        world.leases("a").release(held)
        world.jobs.transition(world.job, JobState.FINISHING, [JobState.RUNNING], why="test")

        assert pieces(world.leases("a")) == ["evaluate:1"]
        assert world.leases("a").acquire() == Wait("finishing")

    def test_paused_work_resumes_where_it_stopped(self, world: World) -> None:
        held = lease_of(world.leases("a").acquire())
        world.jobs.pause(world.job)
        assert world.leases("a").release(held)
        assert world.leases("b").acquire() == Wait("paused")

        world.jobs.resume(world.job)

        assert lease_of(world.leases("b").acquire()).piece == held.piece


class TestExpiry:
    def test_a_lease_that_is_not_renewed_expires(self, world: World) -> None:
        dead = lease_of(world.leases("dead", 0.05).acquire())

        again = await_truth(lambda: zero(world.leases("b").acquire()))

        assert again.token > dead.token
        assert world.jobs.leases(world.job)["train:0"] == "b"
        assert world.jobs.work(world.job)["expired"] == 1

    def test_a_late_heartbeat_renews_an_expired_lease_that_is_not_taken(self, world: World) -> None:
        leases = world.leases("slow")
        held = lease_of(leases.acquire())
        world.expire(held.piece)

        assert leases.renew({}, [held]).lost == frozenset()
        assert lease_of(world.leases("b").acquire()).number == 1, "the lease lasts again"

    def test_more_leases_expire_than_one_script_call_handles(self, make_world: MakeWorld) -> None:
        world = make_world(samples=150, epochs=1, subtasks_per_epoch=150)
        assert len(pieces(world.leases("dead"), 150)) == 150
        world.expire()

        assert pieces(world.leases("b"), 150) == [f"train:{n}" for n in range(150)]
        world.partition().assert_whole()

    def test_another_worker_creates_a_lost_first_snapshot(self, make_world: MakeWorld) -> None:
        world = make_world(running=False)
        lost = lease_of(world.leases("dead").acquire())
        world.expire(lost.piece)

        again = lease_of(world.leases("b").acquire())

        assert again.kind is WorkKind.INITIALISE
        assert not world.leases("dead").report_facts(lost, {})
        assert world.leases("b").report_facts(again, world.facts().to_dict())
        assert world.jobs.get(world.job).facts == world.facts()


class TestRenew:
    def test_reports_lost_leases_and_keeps_the_rest(self, world: World) -> None:
        leases = world.leases("a")
        held = [lease_of(leases.acquire()) for _ in range(3)]
        world.expire(held[1].piece)
        world.leases("b").acquire()

        renewal = leases.renew({}, held)

        assert renewal.lost == {"train:1"}
        assert world.jobs.leases(world.job) == {"train:0": "a", "train:1": "b", "train:2": "a"}

    def test_reports_the_reason_to_leave(self, world: World) -> None:
        world.jobs.workers.drain([(world.job, "a")])
        assert world.leases("a").renew({}, []).leave == "drain"
        renewal = world.leases("b").renew({}, [])
        assert (renewal.state, renewal.leave) == ("running", "")

        world.jobs.workers.quarantine(world.job, "a", "why")
        assert world.leases("a").renew({}, []).leave == "quarantine"

        world.jobs.workers.remove(world.job, "a")
        assert world.jobs.workers.heartbeats(world.job).keys() == {"b"}
        assert world.leases("a").renew({}, []).leave == "quarantine", "a quarantine is permanent"


def test_a_lost_lease_cannot_be_released(world: World) -> None:
    held = lease_of(world.leases("a").acquire())
    world.expire(held.piece)
    taken = lease_of(world.leases("b").acquire())

    assert not world.leases("a").release(held)
    assert not world.leases("a").release(taken), "held by another worker"
    assert world.jobs.leases(world.job) == {"train:0": "b"}


class TestReport:
    @pytest.fixture
    def evaluation(self, world: World) -> Lease:
        world.accounts.account(1, 3, 1, "{}", [0, 1, 2])
        return lease_of(world.leases("a").acquire())

    def test_by_the_holder(self, world: World, evaluation: Lease) -> None:
        assert world.leases("a").report_evaluation(evaluation, RESULT)

        (stored,) = world.jobs.get(world.job).evaluations
        assert (stored.epoch, stored.version, stored.metrics) == (1, 3, {"accuracy": 0.5})
        assert world.jobs.get(world.job).best == stored
        assert (stored.number, stored.samples, stored.step) == (1, 12, 6)
        assert world.jobs.leases(world.job) == {}

    def test_not_by_other_workers(self, world: World, evaluation: Lease) -> None:
        world.expire(evaluation.piece)
        taken = lease_of(world.leases("b").acquire())

        assert not world.leases("a").report_evaluation(evaluation, RESULT)
        assert not world.leases("c").report_evaluation(taken, RESULT)
        assert world.jobs.get(world.job).evaluations == ()
        assert world.leases("b").report_evaluation(taken, RESULT)


def zero(answer: Lease | Wait) -> Lease | None:
    return answer if isinstance(answer, Lease) and answer.number == 0 else None
