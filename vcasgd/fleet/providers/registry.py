"""Providers for the pools of the pools file, and what their clouds allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vcasgd.container_limits import memory_bytes, processors
from vcasgd.errors import SpecError, VcasgdError
from vcasgd.fleet.pools import (
    LOCAL_POOL,
    AwsPoolSpec,
    GcpPoolSpec,
    JoinPoolSpec,
    KubernetesPoolSpec,
    LocalPoolSpec,
    LocalTemplate,
    PoolSpec,
    SlurmPoolSpec,
    load_pools,
    parse_pool,
)
from vcasgd.fleet.prices import PriceTable
from vcasgd.fleet.providers.base import AccountAnswer, Provider
from vcasgd.fleet.providers.commands import ExecProvider
from vcasgd.fleet.providers.joining import JoinedFleet, JoinProvider
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.fleet.providers.slurm import SlurmProvider
from vcasgd.gpus import visible_gpus
from vcasgd.settings import Settings


def configured_pools(settings: Settings) -> tuple[PoolSpec, ...]:
    """Return the pools of ``VCASGD_POOLS``, in order. Raises :class:`~vcasgd.errors.SpecError`.

    Without a file, the pool ``local`` has a machine for each GPU of this computer, if it has any.
    """
    gpus = [] if settings.pools else visible_gpus()[: settings.local_gpus]
    if not gpus:
        return load_pools(settings.pools)
    chosen = "local_capacity" in settings.model_fields_set
    machines = settings.local_capacity if chosen else len(gpus)
    cpus = max(1.0, processors() // max(1, machines))
    pool = LocalPoolSpec(
        name=LOCAL_POOL, provider="local", max_machines=machines, cpus=cpus, gpus=1
    )
    return (pool,)


def make_providers(
    settings: Settings, pools: Sequence[PoolSpec], joined: JoinedFleet | None = None
) -> dict[str, Provider[Any]]:
    """Return the provider of each pool, in order.

    Pools of one region (AWS) or project (Google) share a provider, and so do those that machines
    join by themselves, those of Slurm, and those of one namespace of Kubernetes. ``joined``: where
    the machines are that join. Raises :class:`~vcasgd.errors.SpecError` if a library is missing or
    a price is unknown, and :class:`~vcasgd.errors.FleetError` without credentials.
    """
    made: dict[tuple[str, str], Provider[Any]] = {}
    for pool in pools:
        place = place_of(pool)
        if place not in made:
            together = [other for other in pools if place_of(other) == place]
            made[place] = _make(settings, together, joined or JoinedFleet())
    return {pool.name: made[place_of(pool)] for pool in pools}


def make_reachable(
    settings: Settings,
    rows: Mapping[str, object],
    joined: JoinedFleet | None = None,
    known: Iterable[tuple[PoolSpec, Provider[Any]]] = (),
) -> tuple[dict[str, Provider[Any]], dict[str, str]]:
    """Return providers of pools as far as they can be made, and for the others the reasons.

    ``rows``: pools by name, as in the file. ``known``: other pools, whose providers they share.
    """
    made: dict[str, Provider[Any]] = {}
    problems: dict[str, str] = {}
    places = {place_of(spec): provider for spec, provider in known}
    for name, row in sorted(rows.items()):
        try:
            spec = parse_pool(row, name)
            place = place_of(spec)
            if place not in places:
                places[place] = make_providers(settings, [spec], joined)[name]
            made[name] = places[place]
        except VcasgdError as error:
            problems[name] = str(error)
    return made, problems


def ask_account(settings: Settings, pool: PoolSpec) -> AccountAnswer:
    """Ask the cloud of a pool, with this process's credentials; other pools have no limits.

    Raises :class:`~vcasgd.errors.FleetError` if it doesn't answer, and :class:`ImportError` without
    the cloud's library. Types without a price aren't checked.
    """
    if not isinstance(pool, AwsPoolSpec | GcpPoolSpec):
        return AccountAnswer()
    cpus = {}
    for kind in pool.machine_types:
        with suppress(SpecError):
            table = PriceTable.load(pool.provider, settings.prices)
            cpus[kind] = table.price(pool.region, kind).hardware.cpus
    if isinstance(pool, AwsPoolSpec):
        from vcasgd.fleet.providers.aws_calls import ask_aws

        return ask_aws(pool, settings.cluster, cpus)
    from vcasgd.fleet.providers.gcp_calls import ask_google

    return ask_google(pool, cpus, settings.compute_url)


def _local(settings: Settings, spec: LocalPoolSpec) -> LocalProvider:
    """Return the provider of a local pool, for which the settings have defaults."""
    own = spec.template.model_dump(exclude_none=True)
    defaults = {name: getattr(settings, f"local_{name}") for name in LocalTemplate.model_fields}
    capacity = settings.local_capacity if spec.max_machines is None else spec.max_machines
    gpus = visible_gpus()[: settings.local_gpus] if spec.gpus else []
    gpu_memory = min((round(gpu.memory_bytes / 1e9, 1) for gpu in gpus), default=None)
    known = {
        "max_machines": capacity,
        "template": LocalTemplate(**{**defaults, **own}),
        # The machines share the memory of this computer.
        "memory": spec.memory or round(memory_bytes() / 1e9 / max(1, capacity), 1),
        "gpu": spec.gpu or next((gpu.name for gpu in gpus), None),
        "gpu_memory": spec.gpu_memory or gpu_memory,
    }
    pool, devices = spec.model_copy(update=known), [gpu.uuid for gpu in gpus]
    return LocalProvider(settings.home_path, settings.cluster, pool, devices=devices)


def place_of(pool: PoolSpec) -> tuple[str, str]:
    """Return what pools of one provider have in common."""
    match pool:
        case AwsPoolSpec():
            return pool.provider, pool.region
        case GcpPoolSpec():
            return pool.provider, pool.template.project
        case JoinPoolSpec() | SlurmPoolSpec():
            return pool.provider, ""
        case KubernetesPoolSpec():
            return pool.provider, f"{pool.template.context}/{pool.template.namespace}"
        case _:
            return pool.provider, pool.name


def stored_place(row: object, name: str) -> tuple[str, str] | None:
    """Return :func:`place_of` a pool as it was in the file; None if it is no longer valid."""
    try:
        return place_of(parse_pool(row, name))
    except SpecError:
        return None


def _make(settings: Settings, pools: Sequence[Any], joined: JoinedFleet) -> Provider[Any]:
    """Return the provider of pools of one place, whose library is imported only now."""
    kind, cluster = pools[0].provider, settings.cluster
    try:
        match kind:
            case "aws":
                from vcasgd.fleet.providers.aws import AwsProvider

                table, seconds = PriceTable.load(kind, settings.prices), settings.price_seconds
                return AwsProvider(cluster, pools, table, price_seconds=seconds)
            case "gcp":
                from vcasgd.fleet.providers.gcp import GcpProvider

                table = PriceTable.load(kind, settings.prices)
                return GcpProvider(cluster, pools, table, url=settings.compute_url)
            case "kubernetes":
                from vcasgd.fleet.providers.kubernetes import KubernetesProvider

                return KubernetesProvider(cluster, pools, joined)
            case "exec":
                return ExecProvider(cluster, pools, joined)
            case "slurm":
                return SlurmProvider(cluster, pools, joined)
            case "join":
                return JoinProvider(cluster, pools, joined)
            case _:
                (spec,) = pools
                return _local(settings, spec)
    except ImportError as error:
        raise SpecError(
            f"a pool of provider {kind} needs the library {error.name}, which is not installed",
            remedy=f"run pip install 'vcasgd[{kind}]'",
            field="pools",
        ) from error
