"""Questions to a cloud about a pool: permission to launch, and quotas. Nothing is launched."""

from __future__ import annotations

from contextlib import suppress

from vcasgd.errors import SpecError
from vcasgd.fleet.account_limits import AccountAnswer
from vcasgd.fleet.pools import AwsPoolSpec, GcpPoolSpec, PoolSpec
from vcasgd.fleet.prices import PriceTable
from vcasgd.settings import Settings


def ask_account(settings: Settings, pool: PoolSpec) -> AccountAnswer:
    """Ask the cloud of a pool, with this process's credentials.

    Raises :class:`~vcasgd.errors.FleetError` if it doesn't answer, and :class:`ImportError` without
    the cloud's library. A local pool has no limits, and types without a price aren't checked.
    """
    if not isinstance(pool, AwsPoolSpec | GcpPoolSpec):
        return AccountAnswer()
    cpus = _cpus(settings, pool)
    if isinstance(pool, AwsPoolSpec):
        from vcasgd.fleet.providers.aws.account import ask_aws

        return ask_aws(pool, settings.cluster, cpus)
    from vcasgd.fleet.providers.gcp.account import ask_google

    return ask_google(pool, cpus, settings.compute_url)


def _cpus(settings: Settings, pool: PoolSpec) -> dict[str, float]:
    """Return the vCPUs of the pool's types that have a price."""
    known = {}
    for kind in pool.instance_types:
        with suppress(SpecError):
            table = PriceTable.load(pool.provider, settings.prices)
            known[kind] = table.price(pool.region, kind).cpus
    return known
