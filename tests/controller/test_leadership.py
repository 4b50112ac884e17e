"""The controller's lease: two controllers never act at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks import SteppingServer

from vcasgd.controller.leadership import Leadership
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import CONTROLLER
from vcasgd.store.ledger.servers import Control

Eventually = Callable[..., Any]

HOUR = 3600


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator[SteppingServer]:
    server = SteppingServer(tmp_path / "ledger", durable=False)
    yield server
    server.end()


def leadership(ledger: RedisClient, heartbeat: float = 60.0) -> Leadership:
    return Leadership(Control(ledger), Settings(heartbeat=heartbeat))


def test_a_forward_step_of_the_ledgers_clock_makes_no_two_controllers_act(
    stepping: SteppingServer, eventually: Eventually
) -> None:
    # Given a controller, and one that stands by
    acting, standby = (leadership(stepping.connection) for _ in range(2))
    acting.renew()
    standby.renew()
    assert acting.sure

    # When the step ends the lease, and the other controller takes it
    stepping.set_clock(HOUR)

    def taken() -> bool:
        standby.renew()
        return stepping.connection.hget(CONTROLLER, "token") == b"2"

    eventually(taken)

    # Then only one of them acts until the first one asks again
    assert acting.sure
    assert not standby.sure
    acting.renew()
    assert not acting.sure


def test_a_controller_that_saw_its_predecessor_die_acts_at_once(
    ledger: RedisClient, eventually: Eventually
) -> None:
    dead, standby = (leadership(ledger, 0.05) for _ in range(2))
    dead.renew()

    standby.renew()
    assert not standby.sure

    eventually(lambda: not Control(ledger).held())
    standby.renew()

    assert not dead.sure
    assert standby.sure


def test_a_controller_follows_one_that_stopped_at_once(ledger: RedisClient) -> None:
    stopped, successor = leadership(ledger), leadership(ledger)
    stopped.start()
    stopped.stop()
    assert not stopped.is_alive()

    successor.renew()

    assert not stopped.sure
    assert successor.sure


def test_a_controller_that_never_saw_its_predecessor_waits(
    ledger: RedisClient, eventually: Eventually
) -> None:
    dead, successor = leadership(ledger, 0.05), leadership(ledger)
    dead.renew()
    Control(ledger).release("somebody else")
    eventually(lambda: not Control(ledger).held())

    successor.renew()

    assert not successor.sure, "the lease may have ended by a step of the clock"
