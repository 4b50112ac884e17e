"""Contract of providers: real processes, EC2 emulated by moto, a fake Compute API, a real Slurm
cluster, a fake API server of Kubernetes whose pods are processes, and a user's commands.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.provider_backends import BACKENDS, ProviderBackend, sleeper
from support.waiting import await_truth

from vcasgd.errors import InvalidRequest, NoCapacity
from vcasgd.fleet.providers.base import Provider, one_line
from vcasgd.schemas.fleet import Machine, MachineState

BOOT = sleeper()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProviderBackend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend


@pytest.fixture
def provider(backend: ProviderBackend) -> Iterator[Provider]:
    provider = backend.provider()
    yield provider
    provider.close()


def need(backend: ProviderBackend, *parts: str) -> None:
    """Skip a test of a part of the contract that doesn't apply."""
    for part in parts:
        if part in backend.lacks:
            pytest.skip(backend.lacks[part])


def only(provider: Provider) -> Machine:
    (one,) = provider.machines()
    return one


def ids(provider: Provider) -> set[str]:
    return {one.id for one in provider.machines()}


def test_a_machine_is_listed_with_all_that_is_known(
    backend: ProviderBackend, provider: Provider
) -> None:
    began = time.time()
    (id_,) = provider.launch(backend.pool, 1, BOOT, "t1", zones=[backend.zones[1]])
    await_truth(lambda: only(provider).state is MachineState.RUNNING)
    one = only(provider)
    assert one.id == id_
    assert (one.pool, one.zone, one.spot) == (backend.pool, backend.zones[1], True)
    assert 0 < one.price_per_hour <= one.on_demand_price_per_hour
    assert (one.price_per_hour < one.on_demand_price_per_hour) is ("prices" not in backend.lacks)
    assert one.machine_type == backend.kind
    # Clouds report it in whole seconds.
    assert began - 1 <= one.launched_at <= time.time()
    assert one.notice_at is one.advised_at is None
    assert backend.tags(id_) == {"cluster": "test", "pool": backend.pool}


def test_a_launch_is_idempotent_by_its_token(backend: ProviderBackend, provider: Provider) -> None:
    first = provider.launch(backend.pool, 3, BOOT, "t1")
    assert len(set(first)) == 3
    assert sorted(provider.launch(backend.pool, 3, BOOT, "t1")) == sorted(first)
    assert sorted(backend.provider().launch(backend.pool, 1, BOOT, "t1")) == sorted(first)
    assert ids(provider) == set(first)
    (other,) = provider.launch(backend.pool, 1, BOOT, "t2")
    assert ids(provider) == {*first, other}


def test_a_repeated_launch_knows_machines_that_are_gone(
    backend: ProviderBackend, provider: Provider
) -> None:
    need(backend, "memory")
    first = provider.launch(backend.pool, 2, BOOT, "t1")
    running = MachineState.RUNNING
    await_truth(lambda: all(one.state is running for one in provider.machines()))
    for id_ in first:
        provider.terminate(id_)
    await_truth(lambda: not ids(provider))
    assert sorted(provider.launch(backend.pool, 2, BOOT, "t1")) == sorted(first)
    assert ids(provider) == set()


def test_an_on_demand_machine_costs_what_it_costs(
    backend: ProviderBackend, provider: Provider
) -> None:
    if "both kinds" in backend.lacks:
        with pytest.raises(NoCapacity):
            provider.launch(backend.pool, 1, BOOT, "t1", spot=False)
        assert backend.alive() == set()
        return
    (id_,) = provider.launch(backend.pool, 1, BOOT, "t1", spot=False)
    one = only(provider)
    assert (one.id, one.spot) == (id_, False)
    assert one.price_per_hour == one.on_demand_price_per_hour > 0


def test_terminating_is_idempotent_and_silent(backend: ProviderBackend, provider: Provider) -> None:
    victim, other = provider.launch(backend.pool, 2, BOOT, "t1")
    provider.terminate(victim)
    provider.terminate(victim)
    provider.terminate("nobody")
    provider.terminate('i-0" OR name = "x')
    provider.kill("nobody")
    await_truth(lambda: ids(provider) == {other})
    provider.terminate(victim)
    provider.kill(other)
    await_truth(lambda: not ids(provider))
    await_truth(lambda: not backend.alive())


def test_another_cluster_s_machines_are_never_seen_nor_ended(
    backend: ProviderBackend, provider: Provider
) -> None:
    stranger = backend.provider("stranger")
    (theirs,) = stranger.launch(backend.pool, 1, BOOT, "t1")
    (ours,) = provider.launch(backend.pool, 1, BOOT, "t1")
    assert theirs != ours
    assert ids(provider) == {ours}
    provider.terminate(theirs)
    provider.kill(theirs)
    assert ids(stranger) == {theirs}
    stranger.terminate(theirs)
    stranger.close()


def test_pool_without_capacity_raises_an_error(
    backend: ProviderBackend, provider: Provider
) -> None:
    need(backend, "capacity")
    backend.exhaust(*backend.zones)
    with pytest.raises(NoCapacity) as caught:
        provider.launch(backend.pool, 1, BOOT, "t1")
    assert backend.pool in caught.value.message
    assert caught.value.retryable
    assert backend.alive() == set()


def test_a_pool_gives_what_it_has(backend: ProviderBackend, provider: Provider) -> None:
    need(backend, "partial launches")
    backend.limit_launches(2)
    granted = provider.launch(backend.pool, 5, BOOT, "t1")
    assert len(granted) == 2
    assert ids(provider) == set(granted)
    assert sorted(provider.launch(backend.pool, 5, BOOT, "t1")) == sorted(granted)


def test_another_zone_is_tried(backend: ProviderBackend, provider: Provider) -> None:
    need(backend, "zones")
    backend.exhaust(backend.zones[0])
    (id_,) = provider.launch(backend.pool, 1, BOOT, "t1")
    assert (only(provider).id, only(provider).zone) == (id_, backend.zones[1])


def test_more_machines_than_fit_on_a_page(backend: ProviderBackend, provider: Provider) -> None:
    need(backend, "pages")
    granted = provider.launch(backend.pool, 12, BOOT, "t1")
    assert len(granted) == 12
    assert ids(provider) == set(granted)


def test_offers_have_a_price_a_date_and_a_source(
    backend: ProviderBackend, provider: Provider
) -> None:
    offers = provider.offers(backend.pool)
    assert {offer.zone for offer in offers} == set(backend.zones)
    for offer in offers:
        assert offer.pool == backend.pool
        assert 0 < offer.price_per_hour <= offer.on_demand_price_per_hour
        assert offer.cpus >= 1
        assert offer.source
        assert 0 < offer.as_of <= time.time() + 1


def test_unknown_type_and_zone_are_refused(backend: ProviderBackend, provider: Provider) -> None:
    with pytest.raises(InvalidRequest, match="no zone mars-1a"):
        provider.launch(backend.pool, 1, BOOT, "t1", zones=["mars-1a"])
    with pytest.raises(InvalidRequest, match="no machine type x"):
        provider.launch(backend.pool, 1, BOOT, "t1", machine_types=["x"])
    with pytest.raises(InvalidRequest, match="no pool 'elsewhere'"):
        provider.launch("elsewhere", 1, BOOT, "t1")
    assert backend.alive() == set()


def test_boot_report_of_a_machine_is_returned(backend: ProviderBackend, provider: Provider) -> None:
    need(backend, "boot reports")
    first, second = provider.launch(backend.pool, 2, BOOT, "t1")
    provider.machines()
    assert provider.boot_error(first) is None
    assert provider.boot_error("nobody-0123456789") is None

    backend.report_boot_error(first, "worker: step\n\tadd_user failed")
    provider.machines()

    assert provider.boot_error(first) == "worker: step add_user failed"
    assert provider.boot_error(second) is None


@pytest.mark.parametrize(
    ("said", "shown"),
    [("a\x1b[31m\n\x00 b", "a � b"), (" \n", None), (300 * "é", 250 * "é")],
    ids=["control characters", "nothing", "too much"],
)
def test_boot_report_is_fit_for_display(said: str, shown: str | None) -> None:
    assert one_line(said) == shown
