"""Estimate of a job before anything is bought."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import fleets
from support.fleets import NOW

from vcasgd.errors import SpecError
from vcasgd.fleet.estimate import WAITS, PlannedWork, estimate
from vcasgd.fleet.observed import Market, PoolStatus
from vcasgd.schemas.costs import Offer, PlanView
from vcasgd.spec.job import JobSpec

MEASURED = PlannedWork(samples=36_000, rates={"east|small": 10.0, "west|small": 10.0})


def offer(pool: str, zone: str, price: float) -> Offer:
    return fleets.offer(zone, price, pool=pool, on_demand_price_per_hour=4 * price)


EAST = PoolStatus(
    "east",
    offers=(offer("east", "a", 1.0), offer("east", "b", 1.0)),
    capacity=2,
    labels=frozenset({"eu-only"}),
)
WEST = PoolStatus("west", offers=(offer("west", "c", 2.0),))


def planned(
    known: PlannedWork = MEASURED, *pools: PoolStatus, zone: str | None = None, **fields: Any
) -> PlanView:
    wanted = {"max": 3, "pools": ["east", "west"], **fields.pop("workers", {})}
    spec = JobSpec.parse(
        {"name": "job", "task": "t:T", "epochs": 2, "subtasks_per_epoch": 9, "workers": wanted,
         **fields}
    )  # fmt: skip
    return estimate(spec, pools or (EAST, WEST), known, NOW, store_zone=zone)


def reasons(plan: PlanView) -> dict[str, list[str]]:
    return {each.pool: each.reasons for each in plan.pools}


def test_hours_and_cost() -> None:
    plan = planned()

    # two in the east, where there is room for no more, and one in the west
    assert [(row.zone, row.machines) for row in plan.offers] == [("a", 1), ("b", 1), ("c", 1)]
    assert plan.machines == 3
    assert plan.usd_per_hour == pytest.approx(4.0)
    # 72,000 samples at 30 samples/s
    assert plan.hours == pytest.approx(2 / 3)
    assert plan.cost_usd == pytest.approx(8 / 3)
    assert plan.on_demand_cost_usd == pytest.approx(32 / 3)
    assert plan.offers[0].usd_per_million_samples == pytest.approx(1 / 3600 / 10 * 1e6)
    assert plan.remedies == []
    assert "2 epochs of 36000 samples, as in an earlier job" in plan.assumptions


def test_a_short_deadline_is_judged_by_the_time_that_local_machines_took_before() -> None:
    local = replace(EAST, provider="local", boot_seconds=300.0)
    known = replace(MEASURED, start_seconds=20.0)
    # 72,000 samples on two machines take an hour
    fields = {"within": "63m", "workers": {"max": 2, "pools": ["east"]}}

    assert planned(known, local, **fields).deadline is not None
    for others in ((MEASURED, local), (known, replace(local, provider="aws"))):
        with pytest.raises(SpecError, match="takes about 65 min") as caught:
            planned(*others, **fields)
        assert caught.value.remedy is not None
        assert caught.value.remedy.startswith("set workers.max to 3 or more")
    with pytest.raises(SpecError) as caught:
        planned(MEASURED, local, **{**fields, "within": "4m"})
    assert caught.value.remedy == "give it more time: machines train 5 min after their launch"


def test_the_time_until_machines_train_counts() -> None:
    plan = planned(replace(MEASURED, start_seconds=360.0))

    assert plan.hours == pytest.approx(2 / 3 + 0.1)
    assert plan.cost_usd == pytest.approx(4 * (2 / 3 + 0.1))
    assert "each trains 6 min after its launch, as in an earlier job" in plan.assumptions
    assert not any("booting" in line for line in plan.assumptions)
    assert any("booting" in line for line in planned().assumptions)


def test_the_age_of_an_old_price_is_said() -> None:
    old = offer("east", "a", 1.0).model_copy(update={"as_of": NOW - 400 * 86400})
    plan = planned(MEASURED, PoolStatus("east", offers=(old,)))

    (line,) = (line for line in plan.assumptions if "days old" in line)
    assert line.startswith("the price of small is 400 days old")
    assert not any("days old" in line for line in planned().assumptions)


@pytest.mark.parametrize(
    ("length", "known", "hours", "remedy"),
    [
        ({"max_samples": 108_000}, MEASURED, 1.0, None),
        ({"max_samples": 108_000}, replace(MEASURED, samples=None), 1.0, None),
        ({"max_steps": 1_000}, replace(MEASURED, batch_size=108), 1.0, None),
        ({"max_steps": 1_000}, MEASURED, None, "samples in a step is unknown until"),
    ],
)
def test_hours_of_a_length_in_samples_or_steps(
    length: dict[str, int], known: PlannedWork, hours: float | None, remedy: str | None
) -> None:
    plan = planned(known, epochs=None, **length)

    assert plan.hours == (hours and pytest.approx(hours))
    assert [remedy in each for each in plan.remedies if remedy] == [True] * (remedy is not None)


def test_unknown_numbers_have_a_remedy() -> None:
    plan = planned(PlannedWork())

    assert (plan.hours, plan.cost_usd, plan.on_demand_cost_usd) == (None, None, None)
    assert plan.usd_per_hour == pytest.approx(4.0), "the price is still known"
    samples, speed = plan.remedies
    assert "samples in an epoch is unknown" in samples
    assert "samples per second of one machine" in speed
    assert "--" not in samples + speed, "the dashboard shows them, too"


def test_given_rate_overrides_the_measured_one() -> None:
    given = PlannedWork(samples=3600, samples_given=True, rates=MEASURED.rates, rate_given=1.0)
    plan = planned(given)

    assert plan.hours == pytest.approx(2 * 3600 / 3 / 3600)
    assert "each trains 1 samples/s, as given" in plan.assumptions


def test_pools_are_excluded_by_labels() -> None:
    plan = planned(labels=["eu-only"])

    assert reasons(plan) == {"east": [], "west": ["may not see eu-only"]}
    assert [row.excluded for row in plan.offers] == [None, None, "its pool is excluded"]
    assert plan.machines == 2


@pytest.mark.parametrize(
    ("east", "why"),
    [
        (replace(EAST, blocked_until=NOW + 9, reason="credentials are wrong"),
         "credentials are wrong"),
        (replace(EAST, capacity=0), "all of its machines are in use"),
        (replace(EAST, max_price_per_hour=0.5), "costs more than the maximum of 0.5 USD/h"),
        (replace(EAST, offers=()), "it offers no machines now"),
        (replace(EAST, offers=None, reason="no prices: it is down"), "no prices: it is down"),
        (replace(EAST, markets={(zone, True): Market(blocked_until=NOW + 9, reason="no capacity")
                                for zone in ("a", "b")}), "no capacity"),
    ],
)  # fmt: skip
def test_pools_are_excluded(east: PoolStatus, why: str) -> None:
    plan = planned(MEASURED, east, WEST)

    assert reasons(plan) == {"east": [why], "west": []}
    assert all(row.pool == "west" for row in plan.offers if row.machines)


def test_a_quota_leaves_less() -> None:
    assert planned(MEASURED, replace(EAST, quotas={True: 1}), WEST).machines == 3
    assert planned(MEASURED, replace(EAST, quotas={True: 1})).machines == 1


def test_unknown_pool() -> None:
    assert reasons(planned(workers={"pools": ["moon"]})) == {"moon": ["no such pool"]}
    assert planned(workers={"pools": ["moon"]}).remedies == [
        "nothing can be bought now; see the reasons for each pool above"
    ]


def test_machines_without_risk_have_a_row_of_their_own() -> None:
    plan = planned(workers={"on_demand_min": 1, "max": 2})

    found = [(row.spot, row.price_per_hour) for row in plan.offers if row.machines]
    assert sorted(found) == [(False, 4.0), (True, 1.0)]


def test_a_budget_that_is_too_small_is_said() -> None:
    plan = planned(stop={"max_cost_usd": 1, "max_duration": "30m"})

    assert plan.assumptions[-2:] == [
        "the budget of 1 USD is spent after 38%, and the job is paused",
        "stop.max_duration ends the job after 0.5 h",
    ]


def test_a_pool_survives_being_shown() -> None:
    view = replace(
        EAST, markets={("a", True): Market(3, NOW + 1, "no capacity", NOW)}, quotas={True: 5},
        launching=1, reason="why", provider="aws", labels=frozenset({"b", "a"}), machines=1,
    )  # fmt: skip
    row = view.to_row(0)

    again = PoolStatus.from_row("east", row).with_room()

    assert (row["labels"], row["launches"], row["provider"]) == (["a", "b"], 3, "aws")
    assert again.offers == view.offers
    assert again.market("a", spot=True).reason == "no capacity"
    assert again.capacity == 0, "of two, one runs and one is coming"
    assert again.quotas == {True: 3}
    assert PoolStatus.from_row("old", {}).offers is None


def test_where_all_machines_are_in_use_the_plan_is_for_when_they_are_free() -> None:
    full = replace(EAST, capacity=0)
    spec = JobSpec.parse(
        {"name": "job", "task": "t:T", "epochs": 2, "subtasks_per_epoch": 9,
         "workers": {"max": 3, "pools": ["east"]}}
    )  # fmt: skip

    plan = estimate(spec, (full,), MEASURED, NOW, vacant=(EAST,))

    assert (plan.machines, plan.usd_per_hour) == (2, 2.0)
    assert plan.assumptions[0] == WAITS
    assert (plan.pools[0].usable, plan.remedies) == (True, [])


def test_a_warm_machine_without_work_is_room() -> None:
    status = replace(EAST, capacity=2, quotas={True: 2}, machines=2, idle=1).with_room()

    assert (status.capacity, status.quotas) == (1, {True: 1})


# --- traffic between zones ------------------------------------------------------------------------

#: Two machines: one in the store's zone, one elsewhere. They train 72,000 samples in two epochs.
CLOUD = PoolStatus("cloud", offers=tuple(offer("cloud", zone, 0.05) for zone in "ab"), capacity=2)
WORK = PlannedWork(samples=36_000, batch_size=20, rates={"cloud|small": 10.0})


def traffic(
    work: dict[str, Any], provider: str = "aws", zone: str | None = "a", **fields: Any
) -> PlanView:
    pool, workers = replace(CLOUD, provider=provider), {"max": 2, "pools": ["cloud"]}
    return planned(replace(WORK, **work), pool, zone=zone, workers=workers, **fields)


@pytest.mark.parametrize(("provider", "usd"), [("aws", 0.72), ("gcp", 0.36)])
def test_machines_in_other_zones_pay_for_what_they_move(provider: str, usd: float) -> None:
    # Given an earlier job that moved 1 MB for each sample
    plan = traffic({"bytes_per_sample": 1e6}, provider)

    # Then half of 72 GB is between zones
    assert plan.traffic is not None
    assert plan.traffic.total_bytes == pytest.approx(72e9)
    assert plan.traffic.between_zones == pytest.approx(36e9)
    assert plan.traffic.usd == pytest.approx(usd)
    assert (
        "workers push and fetch 72 GB, as in an earlier job; 36 GB of it between zones (the store "
        f"is in a) for about {usd:.2f} USD, which the cost does not include"
    ) in plan.assumptions


@pytest.mark.parametrize(
    ("fields", "samples", "width"),
    [
        ({"push_every": 10, "update": {"rule": "vc-asgd"}}, 200, 4),
        ({"push_every": 10, "update": {"rule": "vc-asgd", "codec": "bfloat16"}}, 200, 2),
        ({"push_every": 10, "update": {"rule": "async-local-sgd", "codec": "int8"}}, 200, 1),
        ({"push_every": "subtask", "update": {"rule": "vc-asgd"}}, 4000, 4),
        ({"update": {"rule": "rounds"}}, 40, 4),
    ],
)
def test_traffic_follows_from_the_model_and_the_push_interval(
    fields: dict[str, Any], samples: int, width: int
) -> None:
    plan = traffic({"parameters": 1_000_000}, **fields)

    assert plan.traffic is not None
    assert plan.traffic.total_bytes == pytest.approx(72_000 / samples * 2 * width * 1e6)
    assert f"1000000 parameters are pushed and fetched once in {samples} samples" in (
        plan.traffic.assumption
    )


def test_size_from_the_user_replaces_the_measurement() -> None:
    plan = traffic({"parameters": 1000, "bytes_per_sample": 1e9}, push_every=10)
    assert plan.traffic is not None
    assert plan.traffic.total_bytes < 1e9


def test_unknown_zone_of_the_store_has_no_price() -> None:
    plan = traffic({"bytes_per_sample": 1e6}, zone=None)
    assert plan.traffic is not None
    assert (plan.traffic.between_zones, plan.traffic.usd) == (None, None)
    assert any("the store's zone is unknown" in each for each in plan.assumptions)


@pytest.mark.parametrize(
    ("work", "provider"),
    [
        ({}, "aws"),
        ({"parameters": 1000, "batch_size": None}, "aws"),
        ({"bytes_per_sample": 1e6, "samples": None}, "aws"),
        ({"bytes_per_sample": 1e6}, "local"),
    ],
    ids=["nothing measured", "no batch size", "no length", "no cloud"],
)
def test_without_measurements_or_a_cloud_there_is_no_estimate(
    work: dict[str, Any], provider: str
) -> None:
    assert traffic(work, provider, push_every=10).traffic is None
