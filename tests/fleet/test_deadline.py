"""Deadlines: what a job buys by its slack, and how it ends on invented histories."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.fleets import NOW, job, machine, offer

from vcasgd.errors import SpecError
from vcasgd.fleet.deadline import (
    Work,
    ages_on_demand,
    chances,
    cheapest,
    estimated,
    outlook,
    simulate,
    with_deadline,
)

HOUR, DELAY, STEP = 3600.0, 300.0, 60.0


@pytest.mark.parametrize(
    ("left", "ages", "spot"),
    [
        (10 * HOUR, [], None),
        # 2.1 hours of work, and 300 s to boot: 900 s of slack, 640 s are kept
        (2.1 * HOUR + 1200, [], None),
        (2.1 * HOUR + 900, [], 4),
        (2.1 * HOUR + 610, [], 4),
        (2.1 * HOUR + 530, [], 3),
        (2.1 * HOUR + 400, [], 1),
        (2.1 * HOUR + 310, [], 0),
        (2.1 * HOUR - 500, [], 0),
        # machines on demand that have booted take no more time
        (2.1 * HOUR + 310, [DELAY] * 4, 4),
        (2.1 * HOUR + 310, [DELAY] * 2, 2),
        (2.1 * HOUR + 310, [DELAY / 2], 0),
        (-HOUR, [DELAY] * 4, 0),
    ],
)
def test_slack_decides_what_is_bought(left: float, ages: list[float], spot: int | None) -> None:
    assert outlook(left, 2 * HOUR, 4, DELAY, ages).spot == spot


@pytest.mark.parametrize(
    ("left", "spot", "asks"),
    [
        (None, 0, {"minimum": 1, "fallback_after": 60.0, "on_demand_minimum": 0}),
        (9 * HOUR, 0, {"minimum": 0, "fallback_after": math.inf, "on_demand_minimum": 0}),
        (2.1 * HOUR + 900, 1, {"minimum": 4, "fallback_after": 0.0, "on_demand_minimum": 0}),
        (2.1 * HOUR + 460, 1, {"minimum": 4, "fallback_after": 0.0, "on_demand_minimum": 1}),
        (2 * HOUR, 1, {"minimum": 4, "fallback_after": 0.0, "on_demand_minimum": 3}),
        (2 * HOUR, 4, {"minimum": 4, "fallback_after": 0.0, "on_demand_minimum": 0}),
    ],
)
def test_demand_of_a_job_with_a_deadline(
    left: float | None, spot: int, asks: dict[str, Any]
) -> None:
    view = None if left is None else outlook(left, 2 * HOUR, 4, DELAY)
    demand = with_deadline(job("A"), view, 60.0, spot)

    assert {name: getattr(demand, name) for name in asks} == asks
    assert demand.saves


def test_own_fallback_of_a_job_stays_while_it_has_slack() -> None:
    view = outlook(9 * HOUR, 2 * HOUR, 4, DELAY)
    assert with_deadline(job("A", fallback_after=5.0), view, 60.0, 0).fallback_after == 5.0


WORK = Work(
    seconds=4 * 4 * HOUR, left=8 * HOUR, places=4, delay=DELAY, spot_price=1.0, on_demand_price=3.0
)


def sold(*hours: tuple[float, int]) -> list[int]:
    return [count for length, count in hours for _ in range(int(length * HOUR / STEP))]


def test_job_that_always_finds_spot_machines_buys_nothing_else() -> None:
    run = simulate(WORK, sold((8, 4)), STEP)

    assert run.ended == pytest.approx(4 * HOUR + DELAY, abs=2 * STEP)
    assert run.on_demand_seconds == 0.0
    assert run.usd == pytest.approx(4 * run.ended / HOUR, rel=0.01)


def test_job_without_spot_machines_waits_until_its_slack_is_gone_and_ends_in_time() -> None:
    run = simulate(WORK, sold((20, 0)), STEP)

    assert run.ended is not None
    bought_at = run.ended - run.on_demand_seconds / WORK.places
    assert 2 * HOUR < bought_at < 4 * HOUR
    assert 0.85 * WORK.left < run.ended <= WORK.left


def test_machines_on_demand_are_replaced_when_spot_machines_return() -> None:
    run = simulate(WORK, sold((4, 0), (4, 4)), STEP)

    assert run.ended is not None
    assert run.ended <= WORK.left
    assert 0 < run.on_demand_seconds < 4 * 1.5 * HOUR


@pytest.mark.parametrize("seed", range(5))
def test_estimate_of_a_deadline_is_between_spot_and_on_demand(seed: int) -> None:
    found = chances(WORK, seed)

    assert found.in_time == 1.0
    assert 16.0 < found.usd < found.usd_high < 3 * 16.0 + 2


def test_deadline_that_cannot_be_kept_is_refused_with_the_number_of_machines() -> None:
    work = Work(4 * 4 * HOUR, 2 * HOUR, 4, DELAY, 1.0, 3.0)
    with pytest.raises(SpecError, match="within: the job takes about 4 h 5 min with 4") as error:
        estimated(work, NOW, "within")
    assert "workers.max to 9 or more" in (error.value.remedy or "")


def test_cheapest_sample_on_demand() -> None:
    kinds = {"small": 1.0, "large": 3.0, "new": 0.1}
    offers = [offer("z", price, kind, pool="east") for kind, price in kinds.items()]
    rates = {("east", "small"): 10.0, ("east", "large"): 40.0}
    assert cheapest(offers, rates) == (offers[1], 40.0)
    assert cheapest(offers[2:], rates) == (offers[2], 25.0)
    assert cheapest(offers, {}) is None
    assert cheapest([], rates) is None


def test_ages_are_those_of_machines_on_demand() -> None:
    machines = [machine("a", spot=False, age=40.0), machine("b")]
    assert ages_on_demand(machines, NOW) == [40.0]
