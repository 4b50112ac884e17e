"""Workers that have to leave: events of a preemption, and the end of those that don't leave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import SecretStr
from support.fleet_records import PACKAGE, events_of, job_spec

from vcasgd.controller.fleet.act import WorkerActuator, drain_seconds
from vcasgd.controller.fleet.clearance import ClearancePolicy
from vcasgd.controller.fleet.restart_backoff import RestartBackoff
from vcasgd.controller.fleet.workplaces import Workplaces
from vcasgd.fleet.plan import StartWorker, StopWorker
from vcasgd.fleet.pools import parse_pools
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import LostWorkers
from vcasgd.store.ledger.machines import JoinedMachines, WorkerOrders
from vcasgd.worker_names import worker_name


class Workers:
    """Workers that are alive; records those that are killed."""

    def __init__(self, *alive: str) -> None:
        self.alive = set(alive)
        self.killed: list[str] = []
        self.stop = self.killed.append


def actuator(ledger: RedisClient, workplaces: Any, **fields: Any) -> WorkerActuator:
    settings, jobs = Settings(home=Path("/nowhere"), **fields), Jobs(ledger)
    return WorkerActuator(
        settings,
        jobs=jobs,
        workplaces=workplaces,
        clearance=ClearancePolicy(settings, ledger),
        restarts=RestartBackoff(jobs, 1.0),
    )


def test_both_jobs_have_one_event_of_a_preemption(ledger: RedisClient, jobs: Jobs) -> None:
    donor, other = jobs.submit(job_spec(), PACKAGE).id, jobs.submit(job_spec(), PACKAGE).id
    name = worker_name("m-1", donor)
    one = actuator(ledger, Workers(name))
    reason = f"its machine is reassigned to {other}, which has a higher priority"
    for _ in range(2):
        one.stop([StopWorker(name, reason, successor=other)])

    (given,), (received,) = (
        events_of(jobs, donor, "machine-given"),
        events_of(jobs, other, "machine-received"),
    )
    assert given["text"] == f"m-1 goes to {other}, which has a higher priority"
    assert received["text"] == f"m-1 comes from {donor}, because the job has a higher priority"
    assert jobs.workers.draining(donor) == {name}
    assert one.successors == {name: other}


def test_worker_that_an_earlier_controller_stopped_is_killed_in_time(
    ledger: RedisClient, jobs: Jobs
) -> None:
    workers = Workers("A.m-1", "A.m-2")
    patient = actuator(ledger, workers)
    assert drain_seconds(Settings(home=Path("/nowhere"))) > 0
    patient.kill_lingering({"A.m-1"})
    assert not workers.killed

    hasty = actuator(ledger, workers, heartbeat=1e-9)
    hasty.kill_lingering({"A.m-1"})
    hasty.kill_lingering({"A.m-1"})
    assert set(workers.killed) == {"A.m-1"}


def test_only_workers_of_volunteers_learn_that_they_are(ledger: RedisClient, jobs: Jobs) -> None:
    # Given machines that joined in a pool of volunteers, and in one of one's own
    settings = Settings(
        home=Path("/nowhere"),
        ledger_url=SecretStr("redis://10.0.0.1:6379/0"),
        tensors_url=SecretStr("redis://10.0.0.2:6379/0"),
        job_secret=SecretStr("a secret of the cluster"),
    )
    machines, clearance = JoinedMachines(ledger, 10.0), ClearancePolicy(settings, ledger)
    trusted = {"ours": "own", "theirs": "volunteer"}
    pools = parse_pools(
        {"pools": [{"name": n, "provider": "join", "trust": t} for n, t in trusted.items()]}
    )
    clearance.set_pools({pool.name: pool for pool in pools})
    facts = {"host": "h", "cpus": 1, "memory_mb": 1}
    joined = {name: machines.join("ann", "0" * 64, "s", None, name, facts).name for name in trusted}
    for name in joined.values():
        machines.report(name, {}, leaving=False)
    restarts = RestartBackoff(jobs, 1.0)
    workplaces = Workplaces(
        lambda: None, machines, WorkerOrders(ledger), restarts, LostWorkers(ledger)
    )
    workplaces.refresh()

    # When workers are started there
    job = jobs.submit(job_spec(), PACKAGE).id
    starter = WorkerActuator(
        settings,
        jobs=jobs,
        workplaces=workplaces,
        clearance=clearance,
        restarts=restarts,
    )
    listed = [SimpleNamespace(id=name, pool=pool) for pool, name in joined.items()]
    starter.start(
        [StartWorker(one.id, job) for one in listed],
        SimpleNamespace(machines=listed),  # type: ignore[arg-type]
    )

    # Then only the volunteer's one has to commit to its states
    environments = {pool: machines.orders_of(name)[0].env for pool, name in joined.items()}
    assert environments["theirs"]["VCASGD_VOLUNTEER"] == "true"
    assert "VCASGD_VOLUNTEER" not in environments["ours"]
