"""Labelled data stays in cleared pools, whatever a worker does."""

from __future__ import annotations

import pytest
from support.world import MakeWorld, World, lease_of

from vcasgd.controller.jobs.announcements import Announcements
from vcasgd.store.ledger.leases import Lease, Leases, Wait, WorkKind
from vcasgd.store.ledger.placement import Clearances

LABELS = ("confidential", "eu-only")
PASS = "the pass of worker a"


class Guarded:
    """A labelled job. Pool ``inside`` is cleared for it, pool ``outside`` only in part."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clearances = Clearances(world.ledger)
        self.clearances.allow({"inside": LABELS, "outside": LABELS[:1]})

    def worker(self, name: str, pool: str, lease_pass: str = "") -> Leases:
        self.clearances.place({self.world.job: {name: (pool, lease_pass)}})
        return self.claimed(name, lease_pass)

    def claimed(self, name: str, lease_pass: str = "") -> Leases:
        """Return the leases of a worker that claims a name."""
        return Leases(self.world.ledger, self.world.job, name, 60, lease_pass)

    def refusals(self) -> dict[str, str]:
        return self.clearances.refused(self.world.job)


@pytest.fixture
def guarded(make_world: MakeWorld) -> Guarded:
    world = make_world(running=False, labels=LABELS[:1], data={"labels": LABELS[1:]})
    return Guarded(world)


@pytest.fixture
def running(guarded: Guarded) -> Guarded:
    world = guarded.world
    guarded.clearances.place({world.job: {"first": ("inside", "")}})
    world.initialise()
    return guarded


def assert_refused(answer: Lease | Wait, why: str) -> None:
    assert isinstance(answer, Wait), answer
    assert answer.uncleared
    assert answer.reason == f"not cleared: {why}"


OUTSIDE = "pool outside may not see eu-only"


def test_a_refusal_is_an_event_once_with_its_reason(running: Guarded) -> None:
    leases, job = running.worker("b", "outside"), running.world.job
    for _ in range(3):
        leases.acquire()
        leases.renew({}, [])
        # Also by a controller that was restarted.
        Announcements(job, running.world.ledger).step(running.world.jobs.get(job))

    assert [each["details"] for each in running.world.events("lease-refused")] == [
        {"worker": "b", "why": OUTSIDE}
    ]


def test_the_first_snapshot_needs_a_clearance(guarded: Guarded) -> None:
    assert_refused(guarded.worker("b", "outside").acquire(WorkKind.INITIALISE), OUTSIDE)
    assert lease_of(guarded.worker("a", "inside").acquire()).kind is WorkKind.INITIALISE


def test_only_a_pool_cleared_for_all_labels_gets_work_also_returned_one(running: Guarded) -> None:
    inside, outside = running.worker("a", "inside"), running.worker("b", "outside")
    assert_refused(outside.acquire(), OUTSIDE)
    held = lease_of(inside.acquire())
    assert inside.release(held)

    assert_refused(outside.acquire(), OUTSIDE)
    assert lease_of(inside.acquire()).piece == held.piece


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
    assert lease_of(other.acquire()).piece == "train:0", "immediately, not when the lease expires"
    assert_refused(leases.acquire(), "pool inside may not see eu-only")
    running.world.partition().assert_whole()


def test_a_pool_that_regains_its_label_gets_work_again(running: Guarded) -> None:
    leases = running.worker("a", "inside")
    running.clearances.allow({})
    assert_refused(leases.acquire(), "pool inside may not see confidential")

    running.clearances.allow({"inside": LABELS})

    assert lease_of(leases.acquire()).number == 0
    assert leases.renew({}, []).leave == ""


def test_the_controllers_placement_counts_not_the_workers_claim(running: Guarded) -> None:
    leases = running.worker("b", "outside")

    assert_refused(leases.acquire(), OUTSIDE)
    assert leases.renew({"pool": "inside", "machine": "inside-1"}, []).uncleared
    assert_refused(leases.acquire(), OUTSIDE)


@pytest.mark.parametrize("guess", ["", "the pass of worker b"])
def test_a_worker_that_claims_anothers_name_gets_no_work(running: Guarded, guess: str) -> None:
    honest = running.worker("a", "inside", PASS)
    held = lease_of(honest.acquire())
    running.worker("b", "outside", "the pass of worker b")
    impostor = running.claimed("a", guess)

    assert_refused(impostor.acquire(), "its pass does not match")
    assert impostor.renew({}, []).uncleared
    assert impostor.renew({}, [held]).lost == {held.piece}
    assert honest.renew({}, [held]).lost == frozenset()


def test_a_job_without_labels_needs_no_clearance(world: World) -> None:
    Clearances(world.ledger).allow({})
    assert lease_of(world.leases("any").acquire()).number == 0
    assert Clearances(world.ledger).uncleared(world.job, {"any"}) == set()


def test_uncleared_workers(running: Guarded) -> None:
    running.worker("a", "inside")
    running.worker("b", "outside")

    uncleared = running.clearances.uncleared(running.world.job, {"a", "b", "stranger"})

    assert uncleared == {"b", "stranger"}
    assert running.clearances.allowed() == {
        "inside": frozenset(LABELS), "outside": frozenset(LABELS[:1])
    }  # fmt: skip
