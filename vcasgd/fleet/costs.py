"""What machines cost whom, and for what: pure accounting.

Each machine has a *meter*: up to when it is paid for, by which job, and what it does. A meter is
moved on by a *charge*, which is worth something only together with the meter that it starts from;
so a charge that is booked under that condition is booked once, whoever repeats it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from vcasgd.fleet.providers.base import Instance

#: a meter is moved on so often while nothing changes: booking is a write to disk, and what is not
#: booked is counted all the same, see :func:`accrued`
CHARGE_SECONDS = 10.0


class Doing(StrEnum):
    """What a machine is paid for."""

    BOOTING = "booting"
    WORKING = "working"
    IDLE = "idle"


@dataclass(frozen=True)
class Meter:
    """Of one machine. Times are Unix seconds, prices USD per hour."""

    since: float
    """When it was launched."""
    until: float
    job: str | None
    """``None``: nobody pays yet."""
    doing: Doing
    pool: str
    spot: bool
    price_per_hour: float
    on_demand_price_per_hour: float
    closed: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Meter:
        fields = json.loads(text)
        return cls(**{**fields, "doing": Doing(fields["doing"])})


@dataclass(frozen=True)
class Charge:
    """An interval of one machine that a job pays for, and the meter after it."""

    instance: str
    before: Meter | None
    after: Meter
    lost_seconds: float = 0.0
    """Of the work in it, what nobody will ever see."""

    @property
    def job(self) -> str | None:
        return self.before.job if self.before else None

    def amounts(self) -> dict[str, float]:
        """By ``pool|spot|doing|what``: seconds and USD."""
        if self.before is None or self.before.job is None:
            return {}
        return _amounts(self.before, self.after.until - self.before.until, self.lost_seconds)


def opened(one: Instance, job: str | None, doing: Doing, now: float) -> Meter:
    """Of a machine that has none. It is paid for from its launch on."""
    since = min(one.launched_at, now)
    return _at_price(Meter(since, since, job, doing, one.pool, one.spot, 0.0, 0.0), one)


def charge(
    meter: Meter | None, one: Instance, job: str | None, doing: Doing, now: float
) -> Charge | None:
    """What there is to book of a machine that is listed; ``None``: nothing yet.

    ``job`` pays from ``now`` on (``None``: whoever paid before), the interval until then is that
    of the meter.
    """
    if meter is None:
        return Charge(one.id, None, opened(one, job, doing, now))
    job = job or meter.job
    same = (meter.job, meter.doing, meter.price_per_hour, meter.closed) == (
        job, doing, one.price_per_hour, False,
    )  # fmt: skip
    if same and now - meter.until < CHARGE_SECONDS:
        return None
    after = replace(meter, until=max(meter.until, now), job=job, doing=doing, closed=False)
    return Charge(one.id, meter, _at_price(after, one))


def last_charge(
    instance: str, meter: Meter, seen: float, billing_seconds: float, unpushed: float | None
) -> Charge | None:
    """Of a machine that is gone, was ``seen`` last and is charged for ``billing_seconds`` at
    least; ``unpushed``: since when it had trained what was never pushed."""
    if meter.closed:
        return None
    until = max(meter.until, seen, meter.since + billing_seconds)
    lost = 0.0
    if unpushed is not None and meter.doing is Doing.WORKING:
        lost = min(max(0.0, seen - unpushed), until - meter.since)
    return Charge(instance, meter, replace(meter, until=until, closed=True), lost)


def accrued(meter: Meter, now: float) -> float:
    """USD since the meter was moved on last."""
    return 0.0 if meter.closed else _usd(meter.price_per_hour, now - meter.until)


@dataclass(frozen=True)
class Waste:
    seconds: float
    usd: float


@dataclass(frozen=True)
class PoolCost:
    pool: str
    spot: bool
    seconds: float
    usd: float
    on_demand_usd: float


@dataclass(frozen=True)
class CostReport:
    """What a job has cost. ``on_demand_usd``: the same machines for the same time without the
    risk. ``lost_work`` is a part of what was worked, the others are not."""

    spent_usd: float
    on_demand_usd: float
    machine_seconds: float
    pools: tuple[PoolCost, ...]
    booting: Waste
    idle: Waste
    lost_work: Waste

    @property
    def saved_usd(self) -> float:
        return self.on_demand_usd - self.spent_usd


def report(amounts: Mapping[str, float]) -> CostReport:
    """From the sums of :meth:`Charge.amounts`."""
    sums: defaultdict[tuple[str, str, str], defaultdict[str, float]]
    sums = defaultdict(lambda: defaultdict(float))
    for name, value in amounts.items():
        pool, kind, doing, what = name.split("|")
        sums[pool, kind, doing][what] += value
    pools = []
    for pool, kind in sorted({(pool, kind) for pool, kind, _ in sums}):
        rows = [row for key, row in sums.items() if key[:2] == (pool, kind)]
        total = [sum(row[what] for row in rows) for what in ("seconds", "usd", "on_demand_usd")]
        pools.append(PoolCost(pool, kind == "spot", *total))

    def waste(doing: Doing, prefix: str = "") -> Waste:
        rows = [row for key, row in sums.items() if key[2] == doing]
        return Waste(
            sum(row[f"{prefix}seconds"] for row in rows), sum(row[f"{prefix}usd"] for row in rows)
        )

    return CostReport(
        spent_usd=sum(each.usd for each in pools),
        on_demand_usd=sum(each.on_demand_usd for each in pools),
        machine_seconds=sum(each.seconds for each in pools),
        pools=tuple(pools),
        booting=waste(Doing.BOOTING),
        idle=waste(Doing.IDLE),
        lost_work=waste(Doing.WORKING, "lost_"),
    )


def _at_price(meter: Meter, one: Instance) -> Meter:
    return replace(
        meter,
        price_per_hour=one.price_per_hour,
        on_demand_price_per_hour=one.on_demand_price_per_hour,
    )


def _amounts(meter: Meter, seconds: float, lost: float) -> dict[str, float]:
    name = f"{meter.pool}|{'spot' if meter.spot else 'on-demand'}|{meter.doing.value}"
    amounts = {
        f"{name}|seconds": seconds,
        f"{name}|usd": _usd(meter.price_per_hour, seconds),
        f"{name}|on_demand_usd": _usd(meter.on_demand_price_per_hour, seconds),
    }
    if lost:
        amounts[f"{name}|lost_seconds"] = lost
        amounts[f"{name}|lost_usd"] = _usd(meter.price_per_hour, lost)
    return amounts


def _usd(price_per_hour: float, seconds: float) -> float:
    return price_per_hour * max(0.0, seconds) / 3600
