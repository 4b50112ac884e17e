"""Estimate of the traffic between zones, before anything is bought."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.fleets import NOW

from vcasgd.fleet.estimate import PlannedWork, estimate
from vcasgd.fleet.observed import PoolStatus
from vcasgd.fleet.providers.base import Offer
from vcasgd.schemas.costs import PlanView
from vcasgd.spec.job import JobSpec

#: Two machines: one in the store's zone, one elsewhere.
POOL = PoolStatus(
    "cloud",
    offers=tuple(
        Offer(
            pool="cloud", zone=zone, machine_type="small", spot=True, cpus=4.0, gpus=0,
            price_per_hour=0.05, on_demand_price_per_hour=0.2, as_of=NOW, source="test",
        )
        for zone in ("a", "b")
    ),
    capacity=2,
)  # fmt: skip
#: 72,000 samples in two epochs.
WORK = PlannedWork(samples=36_000, batch_size=20, rates={"cloud|small": 10.0})


def planned(
    work: dict[str, Any], provider: str = "aws", zone: str | None = "a", **fields: Any
) -> PlanView:
    spec = JobSpec.parse(
        {"name": "job", "task": "t:T", "epochs": 2, "subtasks_per_epoch": 9,
         "workers": {"max": 2, "pools": ["cloud"]}, **fields}
    )  # fmt: skip
    known = PlannedWork(**{**vars(WORK), **work})
    return estimate(spec, [replace(POOL, provider=provider)], known, NOW, store_zone=zone)


@pytest.mark.parametrize(("provider", "usd"), [("aws", 0.72), ("gcp", 0.36)])
def test_machines_in_other_zones_pay_for_what_they_move(provider: str, usd: float) -> None:
    # Given an earlier job that moved 1 MB for each sample
    plan = planned({"bytes_per_sample": 1e6}, provider)

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
    plan = planned({"parameters": 1_000_000}, **fields)

    assert plan.traffic is not None
    assert plan.traffic.total_bytes == pytest.approx(72_000 / samples * 2 * width * 1e6)
    assert f"1000000 parameters are pushed and fetched once in {samples} samples" in (
        plan.traffic.assumption
    )


def test_size_from_the_user_replaces_the_measurement() -> None:
    plan = planned({"parameters": 1000, "bytes_per_sample": 1e9}, push_every=10)
    assert plan.traffic is not None
    assert plan.traffic.total_bytes < 1e9


def test_unknown_zone_of_the_store_has_no_price() -> None:
    plan = planned({"bytes_per_sample": 1e6}, zone=None)
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
    assert planned(work, provider, push_every=10).traffic is None
