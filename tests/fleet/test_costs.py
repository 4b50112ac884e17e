"""Costs of machines by job and activity, and pauses for a budget."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.fleets import NOW, machine

from vcasgd.fleet.costs import (
    Budget,
    Doing,
    Meter,
    charge,
    clock_amounts,
    commitment,
    last_charge,
    monthly_budgets,
    report,
)
from vcasgd.fleet.observed import Limits

HOUR = 3600.0
ONE = machine("a", age=0, price=1.0, on_demand_price_per_hour=4.0)
METER = Meter(NOW, NOW, "A", Doing.BOOTING, "local", True, 1.0, 4.0)
RUNNING = replace(METER, running=True)


def test_a_new_price_counts_from_when_it_is_seen() -> None:
    dearer = ONE.model_copy(update={"price_per_hour": 2.0})
    change = charge(METER, dearer, "A", Doing.BOOTING, NOW + 1, 0.0)

    assert change is not None
    assert change.amounts()["local|spot|booting|usd"] == 1 / HOUR
    assert change.after.price_per_hour == 2.0


@pytest.mark.parametrize("meter", [METER, RUNNING])
def test_a_meter_outlives_json_and_is_written_as_by_an_earlier_version(meter: Meter) -> None:
    assert Meter.from_json(meter.to_json()) == meter
    # The ledger compares the text.
    new = set() if meter.running else {"running"}
    assert set(json.loads(meter.to_json())) == vars(meter).keys() - new


def test_prices_are_those_of_each_machine() -> None:
    dear = replace(RUNNING, price_per_hour=3.0)
    amounts = clock_amounts([RUNNING, dear], NOW, NOW + 36)
    assert amounts["local|spot|booting|usd"] == pytest.approx(0.04)


def test_a_report_adds_up() -> None:
    working = replace(METER, doing=Doing.WORKING)
    charges = [
        charge(METER, ONE, "A", Doing.WORKING, NOW + 100, 0.0),
        last_charge("a", working, NOW + 3600, 60, NOW + 3564, 0.0),
        last_charge("b", replace(working, pool="other", spot=False, price_per_hour=4.0),
                    NOW + 1800, 60, None, 0.0),
        # An idle one loses no work.
        last_charge("c", replace(METER, doing=Doing.IDLE), NOW + 360, 60, NOW, 0.0),
    ]  # fmt: skip
    sums: dict[str, float] = {}
    for each in charges:
        assert each is not None
        for name, amount in each.amounts().items():
            sums[name] = sums.get(name, 0.0) + amount

    found = report(sums)

    assert found.machine_seconds == pytest.approx(100 + 3600 + 1800 + 360)
    assert found.spent_usd == pytest.approx((100 + 3600 + 360) / HOUR + 2.0)
    assert found.on_demand_usd == pytest.approx(4 * found.machine_seconds / HOUR)
    assert found.saved_usd == pytest.approx(3 * (100 + 3600 + 360) / HOUR)
    assert found.wasted.model_dump() == {
        "booting": {"seconds": 100, "usd": pytest.approx(100 / HOUR)},
        "idle": {"seconds": 360, "usd": pytest.approx(0.1)},
        "lost_work": {"seconds": pytest.approx(36), "usd": pytest.approx(0.01)},
    }
    assert [(each.pool, each.spot) for each in found.pools] == [("local", True), ("other", False)]


LIMITS = Limits(exit_seconds=36.0, billing_seconds=60.0)


def test_old_machines_cost_until_they_are_gone_new_ones_a_minute() -> None:
    machines = [machine("a", age=1000, price=10.0), machine("b", age=12, price=10.0)]
    assert commitment(machines, LIMITS, NOW) == pytest.approx(10 * (36 + 48) / HOUR)


@pytest.mark.parametrize(
    ("spent", "committed", "pauses"),
    [(4.0, 0.99, False), (4.0, 1.0, True), (6.0, 0.1, True), (5.0, 0.01, True)],
)
def test_a_job_pauses_before_its_budget_is_spent(
    spent: float, committed: float, pauses: bool
) -> None:
    budget = Budget("stop.max_cost_usd", 5.0, spent, committed, "raise it")
    assert bool(budget.pause_reason(committed, 0.0)) is pauses


@pytest.mark.parametrize(("spent", "left"), [(1.0, 2.5), (4.0, 0.0)])
def test_what_is_left(spent: float, left: float) -> None:
    assert Budget("stop.max_cost_usd", 5.0, spent, 1.5, "raise it").affordable == left


@pytest.mark.parametrize(
    ("own", "least", "reason"),
    [
        (0.0, 0.0, None),
        (0.6, 0.0, "max_usd_per_month of ann: 4.0000 of 5 USD are spent, and 1.0000 more would"),
        (0.0, 0.1, "the least that a machine costs; to continue, resume it next month"),
    ],
)
def test_a_used_up_month_pauses_the_jobs_that_cost_something(
    own: float, least: float, reason: str | None
) -> None:
    limits = {"ann": 5.0, "bob": 5.0, None: 50.0}
    spent, committed = {"ann": 4.0, "": 30.0}, {"ann": 1.0, None: 2.0}
    found = monthly_budgets(limits, spent, committed, {"ann": 2, None: 1})

    why = found["ann"].pause_reason(own, least)
    assert (why is None) is (reason is None)
    assert (reason or "") in (why or "")
    assert (found["bob"].pause_reason(1.0, 1.0), found["bob"].affordable) == (None, 5.0)
    cluster = found[None]
    assert (cluster.spent, cluster.committed, cluster.jobs) == (34.0, 3.0, 3)
    assert cluster.affordable == pytest.approx(13 / 3)
