"""Contract for three providers: real processes, EC2 emulated by moto, and a fake Compute API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.provider_worlds import World, sleeper, world_of

from vcasgd.errors import InvalidRequest, NoCapacity
from vcasgd.fleet.providers.base import Instance, InstanceState, Provider, one_line

Eventually = Callable[..., Any]
BOOT = sleeper()


@pytest.fixture(params=["local", "aws", "gcp"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with world_of(request.param, tmp_path) as world:
        yield world


@pytest.fixture
def provider(world: World) -> Iterator[Provider]:
    provider = world.provider()
    yield provider
    provider.close()


def find(provider: Provider, id_: str) -> Instance | None:
    return next((one for one in provider.instances() if one.id == id_), None)


def ids(provider: Provider) -> set[str]:
    return {one.id for one in provider.instances()}


def test_a_machine_is_listed_with_all_that_is_known(
    world: World, provider: Provider, eventually: Eventually
) -> None:
    began = time.time()
    (id_,) = provider.launch(world.pool, 1, BOOT, "t1", zones=[world.zones[1]])
    eventually(lambda: (one := find(provider, id_)) and one.state is InstanceState.RUNNING)
    one = find(provider, id_)
    assert one is not None
    assert (one.pool, one.zone, one.spot) == (world.pool, world.zones[1], True)
    assert 0 < one.price_per_hour < one.on_demand_price_per_hour
    assert one.instance_type == world.kind
    # Clouds report it in whole seconds.
    assert began - 1 <= one.launched_at <= time.time()
    assert one.notice_at is one.advised_at is None
    assert world.tags(id_) == {"cluster": "test", "pool": world.pool}


def test_a_launch_is_idempotent_by_its_token(world: World, provider: Provider) -> None:
    first = provider.launch(world.pool, 3, BOOT, "t1")
    assert len(set(first)) == 3
    assert sorted(provider.launch(world.pool, 3, BOOT, "t1")) == sorted(first)
    assert sorted(world.provider().launch(world.pool, 1, BOOT, "t1")) == sorted(first)
    assert ids(provider) == set(first)
    (other,) = provider.launch(world.pool, 1, BOOT, "t2")
    assert ids(provider) == {*first, other}


def test_a_repeated_launch_knows_machines_that_are_gone(
    world: World, provider: Provider, eventually: Eventually
) -> None:
    first = provider.launch(world.pool, 2, BOOT, "t1")
    for id_ in first:
        provider.terminate(id_)
    eventually(lambda: not ids(provider))
    assert sorted(provider.launch(world.pool, 2, BOOT, "t1")) == sorted(first)
    assert ids(provider) == set()


def test_an_on_demand_machine_costs_what_it_costs(world: World, provider: Provider) -> None:
    (id_,) = provider.launch(world.pool, 1, BOOT, "t1", spot=False)
    one = find(provider, id_)
    assert one is not None
    assert not one.spot
    assert one.price_per_hour == one.on_demand_price_per_hour > 0


def test_terminating_is_idempotent_and_silent(
    world: World, provider: Provider, eventually: Eventually
) -> None:
    victim, other = provider.launch(world.pool, 2, BOOT, "t1")
    provider.terminate(victim)
    provider.terminate(victim)
    provider.terminate("nobody")
    provider.terminate('i-0" OR name = "x')
    provider.kill("nobody")
    eventually(lambda: ids(provider) == {other})
    provider.terminate(victim)
    provider.kill(other)
    eventually(lambda: not ids(provider))
    eventually(lambda: not world.alive())


def test_another_cluster_s_machines_are_never_seen_nor_ended(
    world: World, provider: Provider
) -> None:
    stranger = world.provider("stranger")
    (theirs,) = stranger.launch(world.pool, 1, BOOT, "t1")
    (ours,) = provider.launch(world.pool, 1, BOOT, "t1")
    assert theirs != ours
    assert ids(provider) == {ours}
    provider.terminate(theirs)
    provider.kill(theirs)
    assert ids(stranger) == {theirs}
    stranger.terminate(theirs)
    stranger.close()


def test_pool_without_capacity_raises_an_error(world: World, provider: Provider) -> None:
    world.run_out(*world.zones)
    with pytest.raises(NoCapacity) as caught:
        provider.launch(world.pool, 1, BOOT, "t1")
    assert caught.value.pool == world.pool
    assert caught.value.retryable
    assert world.alive() == set()


def test_a_pool_gives_what_it_has(world: World, provider: Provider) -> None:
    world.allow(2)
    granted = provider.launch(world.pool, 5, BOOT, "t1")
    assert len(granted) == 2
    assert ids(provider) == set(granted)
    assert sorted(provider.launch(world.pool, 5, BOOT, "t1")) == sorted(granted)


def test_another_zone_is_tried(world: World, provider: Provider) -> None:
    world.run_out(world.zones[0])
    if world.pool == "local":
        pytest.skip("zones of the local pool are names only; none runs out alone")
    (id_,) = provider.launch(world.pool, 1, BOOT, "t1")
    one = find(provider, id_)
    assert one is not None
    assert one.zone == world.zones[1]


def test_more_machines_than_fit_on_a_page(world: World, provider: Provider) -> None:
    if world.pool == "local":
        pytest.skip("a folder has no pages")
    granted = provider.launch(world.pool, 12, BOOT, "t1")
    assert len(granted) == 12
    assert ids(provider) == set(granted)


def test_offers_have_a_price_a_date_and_a_source(world: World, provider: Provider) -> None:
    offers = provider.offers(world.pool)
    assert {offer.zone for offer in offers} == set(world.zones)
    for offer in offers:
        assert offer.pool == world.pool
        assert 0 < offer.price_per_hour < offer.on_demand_price_per_hour
        assert offer.cpus >= 1
        assert offer.source
        assert 0 < offer.as_of <= time.time() + 1


def test_unknown_type_and_zone_are_refused(world: World, provider: Provider) -> None:
    with pytest.raises(InvalidRequest, match="no zone mars-1a"):
        provider.launch(world.pool, 1, BOOT, "t1", zones=["mars-1a"])
    with pytest.raises(InvalidRequest, match="no instance type x"):
        provider.launch(world.pool, 1, BOOT, "t1", instance_types=["x"])
    with pytest.raises(InvalidRequest, match="no pool 'elsewhere'"):
        provider.launch("elsewhere", 1, BOOT, "t1")
    assert world.alive() == set()


def test_boot_report_of_a_machine_is_returned(world: World, provider: Provider) -> None:
    first, second = provider.launch(world.pool, 2, BOOT, "t1")
    provider.instances()
    assert provider.boot_error(first) is None
    assert provider.boot_error("nobody-0123456789") is None

    world.say(first, "worker: step\n\tadd_user failed")
    provider.instances()

    assert provider.boot_error(first) == "worker: step add_user failed"
    assert provider.boot_error(second) is None


@pytest.mark.parametrize(
    ("said", "shown"),
    [("a\x1b[31m\n b", "a [31m b"), (" \n", None), (300 * "é", 250 * "é")],
    ids=["control characters", "nothing", "too much"],
)
def test_boot_report_is_fit_for_display(said: str, shown: str | None) -> None:
    assert one_line(said) == shown
