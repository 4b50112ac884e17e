"""Labelled data stays where it may be: ways around it, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.world import World

from vcasgd.store.ledger.clearance import Clearances
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.leases import Lease, Leases, Wait, WorkKind

MakeWorld = Callable[..., World]
LABELS = ("confidential", "eu-only")
PASS = "the pass of worker a"


class Guarded:
    """A labelled job; pool ``inside`` may see it, pool ``outside`` only a part."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clearances = Clearances(world.ledger)
        self.clearances.allow({"inside": LABELS, "outside": LABELS[:1]})

    def worker(self, name: str, pool: str, lease_pass: str = "") -> Leases:
        self.clearances.place(self.world.job, name, pool, lease_pass)
        return self.claimed(name, lease_pass)

    def claimed(self, name: str, lease_pass: str = "") -> Leases:
        """As anybody can call himself."""
        return Leases(self.world.ledger, self.world.job, name, 60, lease_pass)

    def refusals(self) -> dict[str, str]:
        return {each["details"]["worker"]: each["details"]["why"]
                for each in self.world.events("lease-refused")}  # fmt: skip


@pytest.fixture
def guarded(make_world: MakeWorld) -> Guarded:
    world = make_world(running=False, labels=LABELS[:1], data={"labels": LABELS[1:]})
    return Guarded(world)


@pytest.fixture
def running(guarded: Guarded) -> Guarded:
    world = guarded.world
    guarded.clearances.place(world.job, "first", "inside")
    world.initialise()
    return guarded


def lease_of(answer: Lease | Wait) -> Lease:
    assert isinstance(answer, Lease), answer
    return answer


def assert_refused(answer: Lease | Wait, why: str) -> None:
    assert isinstance(answer, Wait), answer
    assert answer.uncleared
    assert answer.reason == f"not cleared: {why}"


OUTSIDE = "pool outside may not see eu-only"


def test_only_a_pool_that_may_see_all_labels_gets_work(running: Guarded) -> None:
    assert_refused(running.worker("b", "outside").acquire(), OUTSIDE)
    assert lease_of(running.worker("a", "inside").acquire()).number == 0


def test_a_refusal_is_one_event_with_its_reason(running: Guarded) -> None:
    leases = running.worker("b", "outside")
    for _ in range(3):
        leases.acquire()
        leases.renew({}, [])

    assert [each["details"] for each in running.world.events("lease-refused")] == [
        {"worker": "b", "why": OUTSIDE}
    ]


def test_the_first_snapshot_too(guarded: Guarded) -> None:
    assert_refused(guarded.worker("b", "outside").acquire(WorkKind.INITIALISE), OUTSIDE)
    assert lease_of(guarded.worker("a", "inside").acquire()).kind is WorkKind.INITIALISE


def test_evaluations_too(running: Guarded) -> None:
    running.world.accounts.account(1, 3, 1, "{}", [0, 1, 2])

    assert_refused(running.worker("b", "outside").acquire(WorkKind.EVALUATE), OUTSIDE)
    assert lease_of(running.worker("a", "inside").acquire()).piece == "evaluate:1"


def test_a_returned_remainder_too(running: Guarded) -> None:
    inside = running.worker("a", "inside")
    held = lease_of(inside.acquire())
    assert inside.release(held)

    assert_refused(running.worker("b", "outside").acquire(), OUTSIDE)
    assert lease_of(inside.acquire()).piece == held.piece


def test_what_a_dead_worker_left_too(running: Guarded) -> None:
    held = lease_of(running.worker("a", "inside").acquire())
    running.world.expire(held.piece)

    assert_refused(running.worker("b", "outside").acquire(), OUTSIDE)
    assert lease_of(running.worker("c", "inside").acquire()).piece == held.piece


def test_while_finishing_too(running: Guarded) -> None:
    world = running.world
    world.accounts.account(1, 3, 1, "{}", [0, 1, 2])
    world.jobs.transition(world.job, JobState.FINISHING, [JobState.RUNNING], why="test")

    assert_refused(running.worker("b", "outside").acquire(), OUTSIDE)


def test_a_pool_that_loses_a_label_loses_its_leases_at_the_next_renewal(running: Guarded) -> None:
    leases, other = running.worker("a", "inside"), running.worker("c", "elsewhere")
    held = [lease_of(leases.acquire()) for _ in range(2)]
    assert leases.renew({}, held).lost == frozenset()

    running.clearances.allow({"inside": LABELS[:1], "elsewhere": LABELS})
    renewal = leases.renew({}, held)

    assert renewal.lost == {"train:0", "train:1"}
    assert renewal.uncleared
    assert renewal.leave == "not cleared: pool inside may not see eu-only"
    assert running.world.jobs.leases(running.world.job) == {}
    assert lease_of(other.acquire()).piece == "train:0", "at once, not when the lease expires"
    assert_refused(leases.acquire(), "pool inside may not see eu-only")
    running.world.partition().assert_whole()


def test_one_that_renews_no_more_can_not_take_up_again_what_expired(running: Guarded) -> None:
    leases = running.worker("a", "inside")
    held = lease_of(leases.acquire())
    running.clearances.allow({})
    running.world.expire(held.piece)

    assert leases.renew({}, [held]).lost == {held.piece}


def test_a_pool_that_gets_its_label_back_works_again(running: Guarded) -> None:
    leases = running.worker("a", "inside")
    running.clearances.allow({})
    assert_refused(leases.acquire(), "pool inside may not see confidential")

    running.clearances.allow({"inside": LABELS})

    assert lease_of(leases.acquire()).number == 0
    assert leases.renew({}, []).leave == ""


def test_a_worker_is_where_the_controller_says_not_where_it_says(running: Guarded) -> None:
    leases = running.worker("b", "outside")

    assert_refused(leases.acquire(), OUTSIDE)
    assert leases.renew({"pool": "inside", "instance": "inside-1"}, []).uncleared
    assert_refused(leases.acquire(), OUTSIDE)


def test_a_worker_that_nobody_placed_gets_nothing(running: Guarded) -> None:
    why = "the controller placed no such worker"
    assert_refused(running.claimed("stranger").acquire(), why)
    assert running.refusals() == {"stranger": why}


@pytest.mark.parametrize("guess", ["", "the pass of worker b"])
def test_a_worker_that_takes_the_name_of_another(running: Guarded, guess: str) -> None:
    honest = running.worker("a", "inside", PASS)
    held = lease_of(honest.acquire())
    running.worker("b", "outside", "the pass of worker b")
    liar = running.claimed("a", guess)

    assert_refused(liar.acquire(), "it is not the worker it says")
    assert liar.renew({}, []).uncleared
    assert honest.renew({}, [held]).lost == frozenset()


def test_a_liar_who_knows_a_token_takes_a_lease_from_nobody(running: Guarded) -> None:
    honest = running.worker("a", "inside", PASS)
    held = lease_of(honest.acquire())

    assert running.claimed("a", "guess").renew({}, [held]).lost == {held.piece}

    assert honest.renew({}, [held]).lost == frozenset()


def test_a_job_without_labels_asks_for_nothing(world: World) -> None:
    Clearances(world.ledger).allow({})
    assert lease_of(world.leases("anybody").acquire()).number == 0
    assert Clearances(world.ledger).uncleared(world.job, {"anybody"}) == set()


def test_who_is_not_cleared(running: Guarded) -> None:
    running.worker("a", "inside")
    running.worker("b", "outside")

    found = running.clearances.uncleared(running.world.job, {"a", "b", "stranger"})

    assert found == {"b", "stranger"}
    assert running.clearances.allowed() == {
        "inside": frozenset(LABELS), "outside": frozenset(LABELS[:1])
    }  # fmt: skip
