"""Requests for machines of Google Cloud."""

from __future__ import annotations

import pytest
from support.cloud_rules import google_refusals

from vcasgd.fleet.pools import GcpPoolSpec
from vcasgd.fleet.providers.base import Boot, LaunchOrder


@pytest.mark.parametrize(("spot", "gpus"), [(True, 0), (True, 1), (False, 1), (False, 0)])
def test_machines_with_gpus_are_never_moved_while_they_run(spot: bool, gpus: int) -> None:
    from vcasgd.fleet.providers.gcp_calls import launch_resource

    pool = GcpPoolSpec.model_validate(
        {
            "name": "gpu", "provider": "gcp", "region": "us-central1", "spot": spot, "gpus": gpus,
            "zones": ["us-central1-a"], "machine_types": ["n1-standard-4"],
            "template": {"project": "my-project-123", "instance_template": "workers"},
        }
    )  # fmt: skip

    order = LaunchOrder(pool, 1, Boot(()), "t", pool.zones, pool.machine_types, spot)
    resource = launch_resource(order, "c", "n1-standard-4", {})

    scheduling = resource["instance_properties"]["scheduling"]
    fixed = spot or gpus > 0
    assert scheduling.get("on_host_maintenance") == ("TERMINATE" if fixed else None)
    assert scheduling["provisioning_model"] == ("SPOT" if spot else "STANDARD")


def test_names_fit_the_longest_cluster_and_are_its_own() -> None:
    from vcasgd.fleet.providers.gcp_calls import names_of, request_id

    names = names_of("c" * 40, "p" * 40, "a-token", 3)
    body = {"perInstanceProperties": dict.fromkeys(names)}
    assert list(google_refusals(request_id("a"), body)) == []
    # A role that is limited to them covers no machine of a cluster whose name goes on
    assert all(name.startswith("vcasgd-mine--") for name in names_of("mine", "pool", "t", 2))
    assert not any(name.startswith("vcasgd-mine--") for name in names_of("mine-2", "pool", "t", 2))
