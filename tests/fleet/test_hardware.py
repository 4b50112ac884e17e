"""Resources that jobs ask for: which pools, types, and machines suit them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.fleets import decide, job, machine, observed, on
from support.fleets import offer as offer_in

from vcasgd.errors import SpecError
from vcasgd.fleet.estimate import PlannedWork, estimate
from vcasgd.fleet.observed import PoolStatus, pools_in
from vcasgd.fleet.plan import Launch, StartWorker
from vcasgd.fleet.plan.decide import make_plan
from vcasgd.fleet.pools import pools_of_job
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine
from vcasgd.spec.hardware import Hardware, check_resources, shortfalls
from vcasgd.spec.job import JobSpec
from vcasgd.spec.sections import Resources

NOW = 10_000.0
SMALL, A10G = Hardware(2, 8.4), Hardware(8, 33.3, 1, "A10G", 23.9998)
H100 = Hardware(26, 250.0, 2, "NVIDIA H100 80GB HBM3", 85.5)


def offer(kind: str, has: Hardware, price: float, pool: str = "local") -> Offer:
    return offer_in("z", price, kind, pool=pool, on_demand_price_per_hour=price, **vars(has))


def pool(name: str, *offers: Offer, **more: Any) -> PoolStatus:
    return PoolStatus(
        name, offers=tuple(one.model_copy(update={"pool": name}) for one in offers), **more
    )


def resources(**fields: Any) -> Resources:
    return Resources.model_validate(fields)


def spec(*pools: str, **fields: Any) -> JobSpec:
    named = {"pools": list(pools)} if pools else {}
    return JobSpec.parse(
        {"name": "job", "task": "t:T", "epochs": 1, "workers": named, "resources": fields}
    )


@pytest.mark.parametrize(
    ("has", "wanted", "missing"),
    [
        (A10G, {"gpus": 1, "gpu_memory": "24GB", "cpus": 8, "memory": "32GB"}, []),
        (A10G, {"gpu_types": ["L4", "A10G"]}, []),
        (A10G, {"gpu_types": ["A10"]}, ["gpu_types"]),
        (A10G, {"gpu_memory": "40GB", "cpus": 9}, ["gpu_memory", "cpus"]),
        (A10G, {"gpus": 2, "gpu_types": ["L4"]}, ["gpus"]),
        (H100, {"gpu_types": ["h100"], "gpu_memory": "80 GB", "gpus": 2}, []),
        (H100, {"gpu_types": ["H100-80GB"]}, []),
        (Hardware(4, None, 1, "NVIDIA GeForce RTX 4090"), {"gpu_types": ["RTX4090"]}, []),
        (Hardware(4, None, 1), {"gpu_memory": "8GB", "memory": "1GB"}, ["gpu_memory", "memory"]),
        (SMALL, {"gpu_types": ["L4"]}, ["gpu_types"]),
        (SMALL, {"memory": "8GiB", "gpus": 0}, []),
        (SMALL, {}, []),
    ],
)
def test_a_machine_suits_a_job(has: Hardware, wanted: dict[str, Any], missing: list[str]) -> None:
    assert shortfalls(resources(**wanted), has) == missing


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": 16}, "resources.memory: must be a size with its unit, for example 16GB"),
        ({"memory": "0GB"}, "resources.memory: must be a size with its unit"),
        ({"gpu": 1}, "did you mean gpus?"),
        ({"gpus": 0, "gpu_types": ["L4"]}, "gpus: 0 can't be combined"),
        ({"gpu_types": "L4"}, "resources.gpu_types: must be a list of at least one item"),
    ],
)
def test_a_wrong_resource_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**fields)
    assert message in f"{caught.value.message} {caught.value.remedy}"


def test_ranks_need_as_many_gpus() -> None:
    with pytest.raises(SpecError, match=r"workers.gpus: 4 GPUs train as one worker"):
        JobSpec.parse(
            {"name": "job", "task": "t:T", "epochs": 1, "workers": {"gpus": 4},
             "resources": {"gpus": 2}}
        )  # fmt: skip


def test_resources_outlive_json() -> None:
    one = spec(gpus=1, gpu_memory="24GiB", memory="1.5TB", cpus=4)
    assert JobSpec.parse(one.model_dump(mode="json")).resources == one.resources


SMALL_OFFER, LARGE_OFFER = offer("small", SMALL, 0.1), offer("g5", A10G, 1.0)


def test_the_cheapest_suitable_type_of_the_first_suitable_pool_is_bought() -> None:
    pools = [
        pool("cpu", SMALL_OFFER),
        pool("gpu", SMALL_OFFER, offer("p5", H100, 9.0), LARGE_OFFER),
    ]
    demand = job("A", maximum=1, pools=("cpu", "gpu"), resources=resources(gpus=1))

    launches = decide(observed(jobs=[demand], pools=pools), NOW)

    assert [(one.pool, one.machine_types) for one in launches if isinstance(one, Launch)] == [
        ("gpu", ("g5",))
    ]


def idle(name: str, kind: str = "", **more: Any) -> Machine:
    return machine(name, machine_type=kind, **more)


def test_idle_joined_and_booting_machines_are_matched_by_what_they_have() -> None:
    demand = job("A", minimum=1, maximum=2, resources=resources(gpus=1))
    machines = [idle("m1", "small", price=0.0), idle("m2", hardware=H100), idle("m3", "g5")]
    state = observed(machines, jobs=[demand], pools=[pool("local", SMALL_OFFER, LARGE_OFFER)])

    assert {one.machine_id for one in decide(state, NOW) if isinstance(one, StartWorker)} == {
        "m2", "m3"
    }  # fmt: skip

    # a job that asks for nothing takes the cheap one, and only a suitable booting one is awaited
    other = job("B", maximum=1)
    state = observed(machines[:1], jobs=[other, demand], nodes="", pools=state.pools)
    launches = [one for one in decide(state, NOW) if isinstance(one, Launch)]
    assert [(one.machine_types, one.count) for one in launches] == [(("g5",), 2)]


def test_a_machine_under_way_is_not_ordered_twice() -> None:
    demand = job("A", maximum=1, resources=resources(gpus=1))
    under_way = pool(
        "local", SMALL_OFFER, LARGE_OFFER, launching=1, launching_kinds={(True, A10G): 1}
    )
    other = replace(under_way, launching_kinds={(True, SMALL): 1})

    assert decide(observed(jobs=[demand], pools=[under_way]), NOW) == []
    assert len(decide(observed(jobs=[demand], pools=[other]), NOW)) == 1


def test_only_suitable_machines_are_taken_from_other_jobs() -> None:
    owner = job("B", maximum=4)
    demand = job("A", minimum=1, maximum=1, priority=1, resources=resources(gpus=1))
    machines = [idle("m1", "small", price=9.0), idle("m2", "g5")]
    full = pool("local", SMALL_OFFER, LARGE_OFFER, capacity=2)
    state = observed(machines, [on("m1", "B"), on("m2", "B")], [owner, demand], pools=[full])

    assert [one.name for one in decide(state, NOW)] == ["B@m2"]


def test_a_job_says_that_no_machine_suits_it() -> None:
    lab = PoolStatus("local", offers=(), provider="join", hardware=(SMALL,))
    demand = job("A", minimum=1, maximum=1, resources=resources(gpus=1))

    state = observed([idle("m1", hardware=SMALL)], jobs=[demand], pools=[lab])

    assert "local: no machine has the resources" in make_plan(state, NOW).waiting["A"].text


def test_pools_are_chosen_by_what_they_have() -> None:
    pools = [
        pool("cpu", SMALL_OFFER, provider="aws"),
        pool("gpu", LARGE_OFFER, provider="aws"),
        pool("owned", LARGE_OFFER, provider="aws", spot=False),
        PoolStatus("lab", offers=(), provider="join", hardware=(H100,)),
    ]
    # as the API reads them
    read = pools_in({each.name: each.to_row(number) for number, each in enumerate(pools)})
    kinds = {each.name: each.kinds for each in read}

    assert pools_of_job(spec(gpus=1), read, kinds) == ("gpu",)
    assert pools_of_job(spec(gpus=1), read[:1] + read[2:], kinds) == ("owned",)
    assert "lab" not in pools_of_job(spec(gpus=2), read, kinds), "it sees jobs that name it only"
    assert pools_of_job(spec(), read, kinds) == ("cpu", "gpu")
    check_resources(resources(gpus=2), ["lab"], kinds)
    check_resources(resources(gpus=2), ["new"], {"new": ()})
    with pytest.raises(SpecError) as caught:
        check_resources(resources(gpus=1, memory="16GB"), ["cpu"], kinds)
    assert caught.value.message == (
        "resources.gpus: no machine of the job's pools has gpus: 1 and memory: 16GB: "
        "pool cpu has 2 CPUs, 8.4 GB of memory, no GPU"
    )
    assert caught.value.remedy == "add pool gpu to workers.pools, which has such machines"
    with pytest.raises(SpecError, match=r"resources.gpu_types: .*1 A10G of 24 GB"):
        check_resources(resources(gpu_types=["B200"]), ["gpu"], kinds)


def test_a_plan_says_why_a_type_is_excluded() -> None:
    both = pool("both", SMALL_OFFER, LARGE_OFFER, provider="aws")

    plan = estimate(spec("both", gpu_types=["A10G"]), [both], PlannedWork(), NOW)

    rows = {row.machine_type: row for row in plan.offers}
    assert (rows["small"].machines, rows["g5"].machines) == (0, 4)
    assert rows["small"].excluded == (
        "it has 2 CPUs, 8.4 GB of memory, no GPU, and the job asks for resources.gpu_types: A10G"
    )
