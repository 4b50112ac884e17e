"""Conversion between a pool's view and the row that the controller publishes.

Only the controller calls clouds. Other processes plan with the rows that it publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from vcasgd.fleet.observed import Market, PoolView
from vcasgd.fleet.pools import JOIN, PoolChoice
from vcasgd.fleet.providers.base import Offer


def to_row(
    view: PoolView,
    *,
    position: int,
    provider: str,
    labels: Iterable[str],
    trust: str,
    machines: int,
    idle: int,
) -> dict[str, Any]:
    """Return plain data.

    ``position`` is the pool's place in the pools file, and ``idle`` the part of ``machines`` that
    a following job finds warm.
    """
    return {
        "position": position,
        "provider": provider,
        "spot": view.spot,
        "labels": sorted(labels),
        "trust": trust,
        "blocked_until": view.blocked_until,
        "reason": view.reason,
        "launches": sum(each.launches for each in view.markets.values()),
        "machines": machines,
        "idle": idle,
        "capacity": view.capacity,
        "launching": view.launching,
        "max_price_per_hour": view.max_price,
        "offers": None if view.offers is None else [asdict(each) for each in view.offers],
        "markets": [
            {"zone": zone, "spot": spot, **asdict(market)}
            for (zone, spot), market in sorted(view.markets.items())
        ],
        "quotas": {"spot" if spot else "on-demand": most for spot, most in view.quotas.items()},
    }


def choices(rows: Mapping[str, Mapping[str, Any]]) -> list[PoolChoice]:
    """Return what jobs choose pools by, in the order of the pools file."""
    ordered = sorted(rows.items(), key=lambda row: (int(row[1].get("position") or 0), row[0]))
    return [
        PoolChoice(
            name,
            bool(row.get("spot", True)),
            frozenset(row.get("labels") or ()),
            row.get("provider") == JOIN,
        )
        for name, row in ordered
    ]


def from_row(name: str, row: Mapping[str, Any], *, vacant: bool = False) -> PoolView:
    """Return the view from a row, possibly of another version, with the room that is left.

    With ``vacant``, all machines count as free.
    """
    offers = row.get("offers")
    markets = {
        (each["zone"], each["spot"]): Market(
            blocked_until=each["blocked_until"],
            reason=each["reason"],
            refused_since=each["refused_since"],
        )
        for each in row.get("markets") or ()
    }
    launching, machines, idle = (
        int(row.get(each) or 0) for each in ("launching", "machines", "idle")
    )
    in_use = 0 if vacant else launching + machines - idle
    capacity = row.get("capacity")
    spot = bool(row.get("spot", True))
    quotas = {kind == "spot": most for kind, most in (row.get("quotas") or {}).items()}
    return PoolView(
        name=name,
        capacity=None if capacity is None else max(0, capacity - in_use),
        blocked_until=float(row.get("blocked_until") or 0.0),
        reason=row.get("reason"),
        spot=spot,
        offers=None if offers is None else tuple(Offer(**each) for each in offers),
        markets=markets,
        quotas={kind: max(0, most - in_use * (kind is spot)) for kind, most in quotas.items()},
        max_price=row.get("max_price_per_hour"),
        joined=row.get("provider") == JOIN,
    )
