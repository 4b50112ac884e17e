"""What the fleet costs, as the API shows it. USD and hours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from vcasgd.fleet.costs import CostReport, PoolCost


class PoolOffer(BaseModel):
    """One type of machine in one zone, as the pool sells it now."""

    zone: str
    instance_type: str
    spot: bool
    cpus: float
    gpus: int
    price_per_hour: float
    on_demand_price_per_hour: float
    as_of: float
    source: str


class PoolSpend(BaseModel):
    """`machines`: that are paid for now. `offers`: `null` where no price is known yet."""

    pool: str
    machines: int
    usd_per_hour: float
    spent_usd: float
    on_demand_usd: float
    offers: list[PoolOffer] | None


class SpendView(BaseModel):
    """What machines cost an hour now, and have cost all jobs so far."""

    usd_per_hour: float
    on_demand_usd_per_hour: float
    spent_usd: float
    on_demand_usd: float
    saved_usd: float
    pools: list[PoolSpend]

    @classmethod
    def of(
        cls,
        instances: Iterable[Mapping[str, Any]],
        pools: Mapping[str, Mapping[str, Any]],
        reports: Iterable[CostReport],
    ) -> SpendView:
        rows, parts = list(instances), [part for each in reports for part in each.pools]
        names = sorted({*pools, *(part.pool for part in parts), *map(_pool, rows)})
        views = [_spend(name, pools.get(name, {}), rows, parts) for name in names]
        spent, on_demand = _sum(views, "spent_usd"), _sum(views, "on_demand_usd")
        return cls(
            usd_per_hour=_sum(views, "usd_per_hour"),
            on_demand_usd_per_hour=sum(row.get("on_demand_price_per_hour") or 0 for row in rows),
            spent_usd=spent,
            on_demand_usd=on_demand,
            saved_usd=on_demand - spent,
            pools=views,
        )


def _spend(
    name: str,
    row: Mapping[str, Any],
    instances: Iterable[Mapping[str, Any]],
    parts: Iterable[PoolCost],
) -> PoolSpend:
    machines = [each for each in instances if _pool(each) == name]
    costs = [part for part in parts if part.pool == name]
    return PoolSpend(
        pool=name,
        machines=len(machines),
        usd_per_hour=sum(each.get("price_per_hour") or 0.0 for each in machines),
        spent_usd=sum(part.usd for part in costs),
        on_demand_usd=sum(part.on_demand_usd for part in costs),
        offers=row.get("offers"),
    )


def _pool(row: Mapping[str, Any]) -> str:
    return str(row.get("pool") or "")


def _sum(views: Iterable[PoolSpend], field: str) -> float:
    return float(sum(getattr(view, field) for view in views))
