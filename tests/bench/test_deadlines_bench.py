"""The plan of the fleet against the simulation of deadlines and a cost that can't be undercut."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from vcasgd.fleet.deadline import Work, simulate

FOLDER = Path(__file__).parents[2] / "benchmarks"
HOUR = 3600.0
#: Two machines for eight hours.
WORK = Work(
    seconds=16 * HOUR, left=16 * HOUR, places=2, delay=300.0, spot_price=0.25, on_demand_price=1.0
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("deadlines")


def hours(*parts: tuple[float, int]) -> list[int]:
    """Return the machines in each minute."""
    return [count for length, count in parts for _ in range(round(60 * length))]


@pytest.mark.parametrize(
    "history",
    [
        hours((20, 2)),
        hours((20, 0)),
        hours((4, 2), (8, 0), (20, 2)),
        hours((6, 0), (3, 2), (2, 0), (3, 1), (20, 2)),
    ],
)
def test_plan_of_the_fleet_keeps_the_deadline_at_the_cost_of_the_simulation(
    bench: Any, history: list[int]
) -> None:
    planned, simulated = bench.PlannedFleet(WORK).run(history), simulate(WORK, history, bench.STEP)

    assert planned.ended is not None
    assert planned.ended <= WORK.left
    assert planned.usd == pytest.approx(simulated.usd, rel=0.1)
    assert bench.known_future(WORK, history) <= planned.usd
