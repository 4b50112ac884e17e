"""Admission of many workers of one job to a tensors server."""

from __future__ import annotations

import pytest
from pydantic import SecretStr
from support.world import World

from vcasgd.errors import SpecError
from vcasgd.settings import Settings
from vcasgd.store import admission as module
from vcasgd.store.admission import TensorsAdmission, joined_environment, worker_environment
from vcasgd.store.connection import RedisClient

SECRET = "a secret of the cluster"
#: Workers that the controller placed; some calls admit fewer.
WORKERS = 120


def users(tensors: RedisClient) -> set[str]:
    names = {name.decode() for name in tensors.execute_command("ACL", "USERS")} - {"default"}
    return {name.partition("/")[2] for name in names}


def test_all_placed_workers_are_admitted_and_not_all_names_that_one_invents(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNPLACED", 100)
    monkeypatch.setattr(module, "USERS_AT_ONCE", 20)
    # Given the workers that the controller placed, one of which reports under many other names
    placed, invented = (
        [f"{kind}-{number:04}" for number in range(WORKERS)] for kind in ("worker", "invented")
    )
    keys = world.ledger_keys
    world.ledger.hset(keys.placed, mapping=dict.fromkeys(placed, "local|"))
    world.ledger.hset(keys.workers, mapping=dict.fromkeys([*invented, *placed], "{}"))
    admission = TensorsAdmission(world.tensors, world.ledger, SECRET, 0.0)
    try:
        admission.refresh({world.job: range(1)})
        calls = 1
        while not admission.admit([]):
            assert len(users(world.tensors)) == calls * module.USERS_AT_ONCE
            calls += 1

        admitted = users(world.tensors)
        assert admitted >= set(placed)
        assert len(admitted - set(placed)) == module.MAX_UNPLACED
        assert calls == (WORKERS + module.MAX_UNPLACED) // module.USERS_AT_ONCE
    finally:
        admission.refresh({})
        admission.admit([])
    assert users(world.tensors) == set()


def test_a_machine_that_joins_gets_a_workers_credentials_and_no_address() -> None:
    settings = Settings(
        ledger_url=SecretStr("redis://:platform@10.0.0.1:6379/3"),
        tensors_url=SecretStr("rediss://:platform@10.0.0.2:1/0 redis://:platform@10.0.0.3:1"),
        job_secret=SecretStr(SECRET),
    )

    there = joined_environment(settings, "job", "job.join-ann-1")

    inside = worker_environment(settings, "job", "job.join-ann-1")
    assert there["VCASGD_WORKER_KEY"] == inside["VCASGD_WORKER_KEY"]
    ledger = there["VCASGD_LEDGER_URL"]
    assert ledger.endswith("@/sockets/ledger?db=3")
    assert ledger.split("@")[0].removeprefix("unix:") == (
        inside["VCASGD_LEDGER_URL"].split("@")[0].removeprefix("redis:")
    )
    first, second = there["VCASGD_TENSORS_URL"].split()
    assert first.endswith("@/sockets/tensors-0?db=0")
    assert second.endswith("@/sockets/tensors-1?db=0")
    assert "VCASGD_VOLUNTEER" not in there
    volunteers = joined_environment(settings, "job", "job.join-ann-1", volunteer=True)
    assert volunteers == {**there, "VCASGD_VOLUNTEER": "true"}
    for value in there.values():
        assert "platform" not in value
        assert "10.0.0" not in value


def test_a_machine_that_joins_never_gets_the_platforms_credentials() -> None:
    settings = Settings(
        ledger_url=SecretStr("redis://:platform@10.0.0.1:6379/0"),
        tensors_url=SecretStr("redis://:platform@10.0.0.2:6379/0"),
    )
    with pytest.raises(SpecError, match="VCASGD_JOB_USERS is false"):
        joined_environment(settings, "job", "job.join-ann-1")
