"""Meters of machines: what each job is charged, and for what."""

from __future__ import annotations

import pytest
from support.fleet_records import HOUR, NOW, PACKAGE, job_spec, machine

from vcasgd.controller.fleet.costs import CostLedger
from vcasgd.fleet.costs import report
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.costs import Costs, month_of
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.ledger.retention import Retention


class Rounds:
    """Rounds of a controller, each at a given time."""

    def __init__(self, ledger: RedisClient) -> None:
        self.ledger = ledger
        self.restart()

    def restart(self) -> None:
        """Continue with a new controller."""
        self.costs = CostLedger(self.ledger)

    def record(
        self, now: float, *machines: Machine, works_for: dict[str, str] | None = None,
        joined: str = "", unlisted: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.costs.record(
            machines,
            joined=frozenset(joined.split()),
            works_for=works_for or {},
            unlisted=unlisted,
            billing_seconds=60.0,
            now=now,
        )

    def amounts(self, job: str) -> dict[str, float]:
        return Costs(self.ledger).of(job)


@pytest.fixture
def rounds(ledger: RedisClient) -> Rounds:
    return Rounds(ledger)


def test_machine_is_charged_to_the_jobs_that_it_worked_for(rounds: Rounds) -> None:
    one = machine("m-1")
    rounds.costs.launched([one], ["A"])
    rounds.record(NOW + 20, one)
    assert rounds.costs.payers == {"m-1": "A"}
    rounds.record(NOW + 30, one, joined="m-1", works_for={"m-1": "A"})
    rounds.record(NOW + 90, one, joined="m-1")
    rounds.record(NOW + 100, one, joined="m-1", works_for={"m-1": "B"})
    rounds.record(NOW + 150, one, joined="m-1", works_for={"m-1": "B"})
    rounds.record(NOW + 200)

    cost = report(rounds.amounts("A"))
    assert cost.wasted.booting.seconds == pytest.approx(30)
    assert cost.wasted.idle.seconds == pytest.approx(10)
    assert cost.machine_seconds == pytest.approx(100)
    assert cost.spent_usd == pytest.approx(100 / HOUR)
    assert cost.on_demand_usd == pytest.approx(300 / HOUR)
    assert report(rounds.amounts("B")).machine_seconds == pytest.approx(50)
    assert rounds.costs.payers == {}
    assert rounds.costs.ended("m-1")


def test_machine_that_waits_in_a_queue_costs_nothing(rounds: Rounds) -> None:
    ordered = [machine("m-1"), machine("m-2")]
    coming = [one.model_copy(update={"state": MachineState.WAITING}) for one in ordered]
    rounds.costs.launched(ordered, ["A", "A"])
    rounds.record(NOW + 5, *coming)
    assert rounds.costs.spent("A", NOW + 3600) == 0
    rounds.record(NOW + 3600, *coming)
    one = ordered[0]
    rounds.record(NOW + 3610, one)
    rounds.record(NOW + 3640, one, joined="m-1", works_for={"m-1": "A"})
    rounds.record(NOW + 3740, one, joined="m-1", works_for={"m-1": "A"})
    rounds.record(NOW + 3750)

    cost = report(rounds.amounts("A"))
    assert cost.machine_seconds == pytest.approx(130)
    assert cost.wasted.booting.seconds == pytest.approx(30)
    assert cost.spent_usd == pytest.approx(130 / HOUR)
    assert rounds.costs.ended("m-1")
    assert rounds.costs.ended("m-2")


def test_month_has_the_costs_of_each_user_once_and_after_jobs_are_deleted(
    rounds: Rounds, jobs: Jobs
) -> None:
    job, other = (jobs.submit(job_spec(), PACKAGE, owner=owner).id for owner in ("ann", None))
    machines, month = [machine("m-1"), machine("m-2")], month_of(NOW)
    rounds.costs.launched(machines, [job, other])
    works_for = {"m-1": job, "m-2": other}
    rounds.record(NOW + 100, *machines, joined="m-1 m-2", works_for=works_for)
    # and one second that is not booked yet
    owners = {job: "ann", other: None}
    open_ = rounds.costs.spent_in_month(owners, NOW + 101)
    assert open_ == {"ann": pytest.approx(101 / HOUR), "": pytest.approx(101 / HOUR)}

    stale = CostLedger(rounds.ledger)
    rounds.record(NOW + 200)
    stale.record([], joined=(), works_for={}, unlisted=(), billing_seconds=60.0, now=NOW + 200)

    booked = Costs(rounds.ledger).spent_in(month)
    assert booked["ann"] == pytest.approx(report(rounds.amounts(job)).spent_usd)
    assert sum(booked.values()) == pytest.approx(200 / HOUR)
    jobs.cancel(job)
    Retention(rounds.ledger).delete(job)
    assert Costs(rounds.ledger).spent_in(month) == booked
    assert Costs(rounds.ledger).spent_in("1999-12") == {}


def test_a_machine_that_is_listed_before_its_launch_is_answered_is_paid_from_the_start(
    rounds: Rounds,
) -> None:
    one = machine("m-1")
    rounds.record(NOW + 5, one)
    rounds.record(NOW + 10, one, joined="m-1")
    rounds.costs.launched([one], ["A"])
    rounds.record(NOW + 20, one, joined="m-1", works_for={"m-1": "A"})
    rounds.costs.launched([one], ["A"])  # a repeated answer
    rounds.record(NOW + 50, one, joined="m-1")

    cost = report(rounds.amounts("A"))
    assert cost.wasted.booting.seconds == pytest.approx(20)
    assert cost.machine_seconds == pytest.approx(50)


def test_restarted_controller_continues_from_the_meters(rounds: Rounds) -> None:
    one = machine("m-1")
    rounds.costs.launched([one], ["A"])
    for seconds in range(0, 100, 5):
        rounds.restart()
        rounds.record(NOW + seconds, one)

    spent = rounds.costs.spent("A", NOW + 95)
    assert spent == pytest.approx(95 / HOUR), "includes the time that is not booked yet"
    assert report(rounds.amounts("A")).spent_usd <= spent


def test_two_controllers_do_not_book_twice(rounds: Rounds) -> None:
    one = machine("m-1")
    rounds.costs.launched([one], ["A"])
    paused = Rounds(rounds.ledger)
    rounds.record(NOW + 50, one)

    for at in (NOW + 50, NOW + 60):
        paused.record(at, one)

    assert report(rounds.amounts("A")).machine_seconds == pytest.approx(60)


def test_unchanged_machines_are_paid_by_one_booking(rounds: Rounds) -> None:
    # Given many machines of two jobs, and one that no job pays for
    fleet = [machine(f"m-{number}") for number in range(100)]
    works_for = {one.id: "AB"[at % 2] for at, one in enumerate(fleet[:-1])}
    rounds.record(NOW, *fleet, works_for=works_for)
    rounds.record(NOW + 5, *fleet, works_for=works_for)
    meters = Costs(rounds.ledger).meters()
    before = rounds.ledger.info("stats")["total_net_input_bytes"]

    # When nothing but the time changes
    for seconds in range(10, 201, 5):
        rounds.record(NOW + seconds, *fleet, works_for=works_for)

    # Then the ledger gets a few amounts instead of meters, and they are exact
    assert Costs(rounds.ledger).meters() == meters
    assert rounds.ledger.info("stats")["total_net_input_bytes"] - before < 20_000
    spent = [report(rounds.amounts(job)).machine_seconds for job in "AB"]
    assert spent == pytest.approx([50 * 195, 49 * 195], rel=0.06), "the last 10 s are not booked"
    assert rounds.costs.spent("A", NOW + 200) == pytest.approx(50 * 200 / HOUR)
    rounds.record(NOW + 200)
    spent = [report(rounds.amounts(job)).machine_seconds for job in "AB"]
    assert spent == pytest.approx([50 * 200, 49 * 200])


def test_a_new_machine_and_a_new_controller_use_the_clock_of_the_job(rounds: Rounds) -> None:
    first, second = machine("m-1"), machine("m-2")
    works_for = {"m-1": "A", "m-2": "A"}
    for seconds in (0, 5, 20, 40):
        rounds.record(NOW + seconds, first, works_for=works_for)
    rounds.record(NOW + 41)  # All machines of the job are gone for a while.
    rounds.restart()
    for seconds in (100, 105, 130):
        rounds.record(NOW + seconds, second, works_for=works_for)
        rounds.restart()
    rounds.record(NOW + 140)

    # It has cost at least a minute, and the second one since its launch until it was last listed
    assert report(rounds.amounts("A")).machine_seconds == pytest.approx(60 + 130)


def test_two_controllers_do_not_advance_a_clock_twice(rounds: Rounds) -> None:
    one, works_for = machine("m-1"), {"m-1": "A"}
    rounds.record(NOW, one, works_for=works_for)
    rounds.record(NOW + 1, one, works_for=works_for)
    paused = Rounds(rounds.ledger)
    rounds.record(NOW + 50, one, works_for=works_for)

    # The other one believes that nothing is paid since its start: all machines, or a single one.
    paused.record(NOW + 60, one, works_for=works_for)
    assert report(rounds.amounts("A")).machine_seconds == pytest.approx(50)
    other = Rounds(rounds.ledger)
    rounds.record(NOW + 70, one, works_for=works_for)
    other.record(NOW + 71, one, works_for={"m-1": "B"})
    assert report(rounds.amounts("A")).machine_seconds == pytest.approx(70)

    # Each continues from what is booked.
    other.record(NOW + 72, one, works_for={"m-1": "B"})
    assert report(rounds.amounts("A")).machine_seconds == pytest.approx(72)
    assert rounds.amounts("B") == {}


def test_a_job_that_was_deleted_stops_no_booking(rounds: Rounds) -> None:
    one, two = machine("m-1"), machine("m-2")
    works_for = {"m-1": "A", "m-2": "B"}
    for seconds in (0, 5, 20):
        rounds.record(NOW + seconds, one, two, works_for=works_for)
    rounds.ledger.delete(LedgerKeys("A").costs)
    for seconds in (40, 60, 80):
        rounds.record(NOW + seconds, one, two, works_for=works_for)

    assert report(rounds.amounts("B")).machine_seconds == pytest.approx(80)


def test_launched_machine_that_is_never_listed_costs_nothing(rounds: Rounds) -> None:
    rounds.costs.launched([machine("m-1")], ["A"])
    rounds.record(NOW + 30, unlisted=("m-1",))
    assert rounds.costs.payers == {"m-1": "A"}
    rounds.record(NOW + 90)

    assert rounds.amounts("A").get("east|spot|booting|usd", 0.0) == 0.0
    assert rounds.costs.payers == {}


@pytest.mark.parametrize(
    ("seen", "gone", "again", "seconds"),
    [
        pytest.param([5], 10, [], 60, id="it costs at least a minute"),
        pytest.param([100], 110, [130, 140], 140, id="it is listed again"),
        pytest.param([0, 1, 100], None, [20, 60, 150], 150, id="the clock steps back"),
    ],
)
def test_a_machine_is_not_charged_twice(
    rounds: Rounds, seen: list[float], gone: float | None, again: list[float], seconds: float
) -> None:
    one, works_for = machine("m-1"), {"m-1": "A"}
    for at in seen:
        rounds.record(NOW + at, one, works_for=works_for)
    if gone is None:
        rounds.restart()
    else:
        rounds.record(NOW + gone)
    for at in again:
        rounds.record(NOW + at, one, works_for=works_for, joined="m-1")

    assert report(rounds.amounts("A")).machine_seconds == pytest.approx(seconds)


def test_costs_go_on_after_a_clock_that_was_far_ahead(rounds: Rounds) -> None:
    # Given a controller whose clock is a year ahead, and machines of two jobs
    year = 365 * 24 * HOUR
    one, two = (machine(name, launched_at=NOW + year) for name in ("m-1", "m-2"))
    works_for = {"m-1": "A", "m-2": "B"}
    for at in (0, 100):
        rounds.record(NOW + year + at, one, two, works_for=works_for)
    rounds.record(NOW + year + 105, one, works_for=works_for)

    # When the next one has the right clock
    rounds.restart()
    for at in (110, 150, 210):
        rounds.record(NOW + at, one, works_for=works_for)

    # Then both pay for the time that each of them has observed
    assert report(rounds.amounts("A")).machine_seconds == pytest.approx(100 + 100)
    assert report(rounds.amounts("B")).machine_seconds == pytest.approx(100)
    assert rounds.costs.spent("A", NOW + 215) == pytest.approx(205 / HOUR)


def test_machines_and_their_jobs_are_forgotten_after_a_day(rounds: Rounds) -> None:
    one, two = machine("m-1"), machine("m-2")
    rounds.record(NOW + 100, one, two, works_for={"m-1": "job-A", "m-2": "job-B"})
    rounds.record(NOW + 110, two, works_for={"m-2": "job-B"})
    assert "job-A" in str(vars(rounds.costs))
    rounds.record(NOW + 30 * HOUR, two, works_for={"m-2": "job-B"})
    rounds.record(NOW + 30 * HOUR + 10, two, works_for={"m-2": "job-B"})

    assert "job-A" not in str(vars(rounds.costs))
    assert report(rounds.amounts("job-A")).machine_seconds == pytest.approx(100)
    assert report(rounds.amounts("job-B")).machine_seconds == pytest.approx(30 * HOUR + 10)


@pytest.mark.parametrize(
    ("since", "lost"), [(NOW + 80, 20.0), (None, 0.0), (1.0, 100.0), (-1e9, 0.0), ("lies", 0.0)]
)
def test_lost_work_is_the_unpushed_work_of_a_killed_worker(
    jobs: Jobs, rounds: Rounds, since: object, lost: float
) -> None:
    job = jobs.submit(job_spec(), PACKAGE).id
    beat = {"unpushed_since": since}
    Leases(rounds.ledger, job, f"{job}.m-1", 60).renew(beat, [])
    one = machine("m-1")
    rounds.record(NOW, one, works_for={"m-1": job}, joined="m-1")
    rounds.record(NOW + 100, one, works_for={"m-1": job}, joined="m-1")
    rounds.record(NOW + 101)

    cost = report(rounds.amounts(job))
    assert cost.wasted.lost_work.seconds == pytest.approx(lost)
    assert cost.wasted.lost_work.usd == pytest.approx(lost / HOUR)
