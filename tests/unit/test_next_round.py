"""When the fleet loop looks again."""

from __future__ import annotations

import pytest
from support.fleets import job, machine, observed, on

from vcasgd.controller.fleet.loop import next_round
from vcasgd.fleet.observed import Observed

HEARTBEAT = 1.0
BUSY = observed([machine("i1"), machine("i2")], [on("i1"), on("i2")], [job("A")])
BOOTING = observed([machine("i1"), machine("i2")], [on("i1")], [job("A")], nodes="i1")


@pytest.mark.parametrize(
    ("state", "round_seconds", "pause"),
    [
        (observed(), 0.01, HEARTBEAT),
        (observed([machine("i1")]), 0.01, HEARTBEAT / 2),
        (observed([], [], [job("A")]), 0.01, HEARTBEAT / 2),
        (BUSY, 0.01, HEARTBEAT / 2),
        (BOOTING, 0.01, HEARTBEAT / 10),
        # A round with many machines is not repeated all the time.
        (BOOTING, 0.05, 0.2),
        (BOOTING, 3.0, HEARTBEAT / 2),
    ],
)
def test_it_looks_again_soon_only_while_a_machine_boots(
    state: Observed, round_seconds: float, pause: float
) -> None:
    assert next_round(state, HEARTBEAT, round_seconds) == pytest.approx(pause)
