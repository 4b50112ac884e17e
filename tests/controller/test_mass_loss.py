"""Hundreds of machines that disappear at once cost the controller a bounded number of requests."""

from __future__ import annotations

import pytest
from support.controllers import Cloud, Controllers
from support.fleet_records import NOW, PACKAGE, events_of, job_spec, machine
from support.work import calls_of

from vcasgd.controller.fleet.costs import CostLedger
from vcasgd.controller.fleet.machine_timeline import Sighting, advance
from vcasgd.fleet.costs import report
from vcasgd.schemas.history import SpanView, TimelineView
from vcasgd.spec.job import JobState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.worker_names import worker_name

COUNT = 300


@pytest.fixture
def job(jobs: Jobs) -> str:
    return jobs.submit(job_spec(), PACKAGE).id


def reads_of_heartbeats(ledger: RedisClient) -> int:
    """Return how often the ledger was asked for all heartbeats of a job."""
    row = ledger.info("commandstats").get("cmdstat_hgetall", {})
    return int(row.get("calls", 0))


def test_last_charges_of_all_lost_machines_read_no_other_heartbeats(
    ledger: RedisClient, job: str
) -> None:
    # Given machines that work, one of which had trained something that it didn't push
    fleet = [machine(f"m-{number}") for number in range(COUNT)]
    works_for = {one.id: job for one in fleet}
    costs = CostLedger(ledger)
    arguments = {"joined": works_for.keys(), "unlisted": (), "billing_seconds": 0.0}
    costs.record(fleet, works_for=works_for, now=NOW, **arguments)
    costs.record(fleet, works_for=works_for, now=NOW + 100, **arguments)
    Leases(ledger, job, worker_name("m-0", job), 60).renew({"unpushed_since": NOW + 90}, [])

    # When all disappear
    before = reads_of_heartbeats(ledger)
    costs.record([], works_for={}, now=NOW + 101, **arguments)

    # Then each is paid for until it was last seen, and the lost work of one is known
    assert costs.payers == {}
    assert reads_of_heartbeats(ledger) == before
    booked = report(Costs(ledger).of(job))
    assert booked.machine_seconds == pytest.approx(100.0 * COUNT)
    assert booked.wasted.lost_work.seconds == pytest.approx(10.0)


def test_all_losses_are_recorded_once(
    ledger: RedisClient, controllers: Controllers, jobs: Jobs
) -> None:
    # Given many machines that work for a job
    workers = {"min": COUNT, "max": COUNT}
    job = jobs.submit(job_spec(workers=workers, subtasks_per_epoch=COUNT), PACKAGE).id
    cloud = Cloud(COUNT)
    loop, _ = controllers.run_with(cloud, COUNT)
    jobs.transition(job, JobState.PAUSED, [JobState.STARTING], why="test")

    # When all disappear
    before = ledger.info("stats")["total_commands_processed"]
    cloud.lose(COUNT)
    loop.round()

    # Then each costs a few commands, including those of scripts
    assert ledger.info("stats")["total_commands_processed"] - before < 20 * COUNT
    assert jobs.get(job).kills == COUNT
    assert len(events_of(jobs, job, "worker-killed")) <= COUNT
    assert Control(ledger).machines() == {}


def test_work_for_replacements_grows_with_their_number_and_not_its_square() -> None:
    def replaced(count: int) -> tuple[dict[str, TimelineView], dict[str, Sighting]]:
        ran = SpanView(state="running", since=0.0, until=100.0)
        died = SpanView(state="dead", since=100.0, until=None)
        one = machine("new", launched_at=101.0)
        shown = {**vars(one), "machine": "old", "spans": [ran, died], "lost": True}
        lost = TimelineView.model_validate(shown)
        timelines = {f"old-{at}": lost for at in range(count)}
        new: dict[str, Sighting] = {f"new-{at}": (one, "booting") for at in range(count)}
        return timelines, new

    small, large = replaced(100), replaced(400)
    after = advance(*large, {}, 102.0)
    assert {each.replaced_by for each in after.values()} == {None, *large[1]}
    assert calls_of(lambda: advance(*large, {}, 102.0)) < 5 * calls_of(
        lambda: advance(*small, {}, 102.0)
    )
