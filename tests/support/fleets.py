"""Invented fleets for tests of the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from vcasgd.fleet.observed import (
    JobDemand,
    Limits,
    ObservationTimes,
    Observed,
    PoolStatus,
    WorkerView,
    with_history,
)
from vcasgd.fleet.plan import (
    Blame,
    Launch,
    StartWorker,
    StopWorker,
    Terminate,
    launch_token,
    market_name,
)
from vcasgd.fleet.plan.decide import make_plan
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState

NOW = 10_000.0
LIMITS = Limits(idle_seconds=60, boot_seconds=300, lost_seconds=30, surplus_seconds=15)
Action = StopWorker | Terminate | Blame | StartWorker | Launch


@dataclass(frozen=True)
class Row:
    """A case of the plan: a state, and the actions that are decided in it."""

    case: str
    state: Observed
    actions: list[Action]


def launch(
    count: int, zone: str = "z", kinds: str = "small", *, pool: str = "local", spot: bool = True,
    launches: int = 0,
) -> Launch:  # fmt: skip
    token = launch_token("test", market_name(pool, zone, spot), launches)
    return Launch(pool, count, token, zone, tuple(kinds.split()), spot)


def machine(
    id_: str, *, pool: str = "local", age: float = 100.0, price: float = 1.0, **more: Any
) -> Machine:
    fields: dict[str, Any] = {"spot": True, "zone": "z", **more}
    return Machine(
        id=id_,
        pool=pool,
        state=MachineState.RUNNING,
        launched_at=NOW - age,
        notice_at=None,
        host="127.0.0.1",
        price_per_hour=price,
        **fields,
    )


def leaving(id_: str) -> Machine:
    return machine(id_).model_copy(update={"state": MachineState.LEAVING, "notice_at": NOW + 5})


def job(name: str, minimum: int = 0, maximum: int = 4, **fields: Any) -> JobDemand:
    defaults: dict[str, Any] = {"pools": ("local",), "wants": 100, "running": True}
    return JobDemand(name, minimum, maximum, **(defaults | fields))


def on(machine_id: str, job: str = "A", *, alive: bool = True) -> WorkerView:
    return WorkerView(f"{job}@{machine_id}", job, machine_id, alive)


def observed(
    machines: list[Machine] | None = None,
    workers: list[WorkerView] | None = None,
    jobs: list[JobDemand] | None = None,
    *,
    nodes: str = "*",
    pools: list[PoolStatus] | None = None,
    history: ObservationTimes | None = None,
) -> Observed:
    """Return an observation, in which pools without offers sell one type in the zone ``z``.

    ``nodes``: ``*`` for all machines, else IDs separated by blanks.
    """
    machines = tuple(machines or ())
    joined = {one.id for one in machines} if nodes == "*" else set(nodes.split())
    return Observed(
        ledger="test",
        machines=machines,
        nodes=frozenset(joined),
        workers=tuple(workers or ()),
        jobs=tuple(jobs or ()),
        pools=tuple(map(selling, pools or [PoolStatus("local")])),
        history=history or ObservationTimes(since=0.0),
        limits=LIMITS,
    )


def offer(
    zone: str = "z", price: float = 1.0, kind: str = "small", *, pool: str = "local", **more: Any
) -> Offer:
    fields = {
        "spot": True, "on_demand_price_per_hour": 3 * price, "cpus": 4.0, "gpus": 0, "as_of": NOW,
        "source": "test", **more,
    }  # fmt: skip
    return Offer(pool=pool, zone=zone, machine_type=kind, price_per_hour=price, **fields)


def selling(pool: PoolStatus) -> PoolStatus:
    """Return a pool with an offer, if it has none."""
    offers = (offer(pool=pool.name, spot=pool.spot),)
    return replace(pool, offers=offers) if pool.offers is None else pool


def remembered(state: Observed) -> Observed:
    """Return an up-to-date memory, with the row's times of joining and of high prices."""
    fresh = with_history(state, NOW)
    joined = {**fresh.history.joined, **state.history.joined}
    dear = {**fresh.history.dear, **state.history.dear}
    return replace(fresh, history=replace(fresh.history, joined=joined, dear=dear))


def decide(state: Observed, now: float) -> list[Action]:
    """Return the actions of the plan, in order."""
    plan = make_plan(state, now)
    return [*plan.stops, *plan.ends, *plan.blames, *plan.starts, *plan.launches]


def carried_out(state: Observed, actions: Iterable[Action], now: float) -> Observed:
    """Return the fleet after the actions: new machines have joined, and workers that were asked to
    leave are there for one more round.
    """
    machines = {one.id: one for one in state.machines}
    workers = {
        worker.name: worker
        for worker in state.workers
        if worker.alive and worker.name not in state.draining
    }
    draining: dict[str, str | None] = {}
    for number, action in enumerate(actions):
        match action:
            case Launch(pool=pool, count=count, zone=zone):
                for index in range(count):
                    id_ = f"n{now:.0f}-{number}-{index}"
                    machines[id_] = machine(id_, pool=pool, zone=zone, age=NOW - now)
            case StartWorker(machine_id, job_):
                assert machine_id not in {worker.machine_id for worker in workers.values()}
                worker = on(machine_id, job_)
                workers[worker.name] = worker
            case StopWorker(name, _, successor):
                draining[name] = successor
            case Terminate(machine_id):
                del machines[machine_id]
    living = {name: each for name, each in workers.items() if each.machine_id in machines}
    return replace(
        state,
        machines=tuple(machines.values()),
        nodes=frozenset(machines),
        workers=tuple(living.values()),
        draining={name: successor for name, successor in draining.items() if name in living},
    )
