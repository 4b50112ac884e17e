"""Limits of an account for a pool, as its cloud reports them. Nothing is launched."""

from __future__ import annotations

from contextlib import suppress

from vcasgd.errors import SpecError
from vcasgd.fleet.pools import AwsPoolSpec, GcpPoolSpec, PoolSpec
from vcasgd.fleet.prices import PriceTable
from vcasgd.fleet.providers.base import AccountAnswer
from vcasgd.settings import Settings


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
            cpus[kind] = table.price(pool.region, kind).cpus
    if isinstance(pool, AwsPoolSpec):
        from vcasgd.fleet.providers.aws.account import ask_aws

        return ask_aws(pool, settings.cluster, cpus)
    from vcasgd.fleet.providers.gcp.account import ask_google

    return ask_google(pool, cpus, settings.compute_url)
