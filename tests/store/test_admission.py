"""Admission of many workers of one job to a tensors server."""

from __future__ import annotations

from support.world import World

from vcasgd.store.admission import MOST_UNPLACED, USERS_AT_ONCE, TensorsAdmission
from vcasgd.store.connection import RedisClient

SECRET = "a secret of the cluster"
#: More workers than a few calls admit. A job can have 10,000.
WORKERS = 1200


def users(tensors: RedisClient) -> set[str]:
    names = {name.decode() for name in tensors.execute_command("ACL", "USERS")} - {"default"}
    return {name.partition("/")[2] for name in names}


def test_all_placed_workers_are_admitted_and_not_all_names_that_one_invents(world: World) -> None:
    # Given the workers that the controller placed, one of which reports under many other names
    placed, invented = (
        [f"{kind}-{number:04}" for number in range(WORKERS)] for kind in ("worker", "invented")
    )
    keys = world.ledger_keys
    world.ledger.hset(keys.placed, mapping=dict.fromkeys(placed, "local|"))
    world.ledger.hset(keys.workers, mapping=dict.fromkeys([*invented, *placed], "{}"))
    admission = TensorsAdmission(world.tensors, world.ledger, SECRET, 0.0)
    try:
        # When they are admitted, with bounded work in each call
        admission.refresh([world.job])
        calls = 1
        while not admission.admit([]):
            assert len(users(world.tensors)) == calls * USERS_AT_ONCE
            calls += 1

        # Then all placed ones have access
        admitted = users(world.tensors)
        assert admitted >= set(placed)
        assert len(admitted - set(placed)) == MOST_UNPLACED
        assert calls == -(-(WORKERS + MOST_UNPLACED) // USERS_AT_ONCE)
    finally:
        admission.refresh([])
        admission.admit([])
    assert users(world.tensors) == set()
