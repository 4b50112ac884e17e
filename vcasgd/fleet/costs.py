"""Accounting of machine costs, and budgets; pure functions.

Each machine has a *meter*: until when it is paid for, by which job, and what it does. A *charge*
advances a meter. It is valid only together with the meter that it starts from, so a charge that is
booked under that condition is booked once, however often it is repeated.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from vcasgd.fleet.observed import Limits
from vcasgd.fleet.providers.base import Instance

#: Seconds between two charges while nothing changes. Booking writes to disk, and :func:`accrued`
#: counts what is not booked yet.
CHARGE_SECONDS = 10.0

#: Field that the reason of a pause for the budget starts with.
FIELD = "stop.max_cost_usd"


class Doing(StrEnum):
    """Activity that a machine is paid for."""

    BOOTING = "booting"
    WORKING = "working"
    IDLE = "idle"


@dataclass(frozen=True)
class Meter:
    """Meter of one machine. Times are Unix seconds, prices USD per hour."""

    since: float
    """Time of the launch."""
    until: float
    job: str | None
    """None if no job pays yet."""
    doing: Doing
    pool: str
    spot: bool
    price_per_hour: float
    on_demand_price_per_hour: float
    closed: bool = False

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Meter:
        """Parse the stored form."""
        fields = json.loads(text)
        return cls(**{**fields, "doing": Doing(fields["doing"])})


@dataclass(frozen=True)
class Charge:
    """Interval of one machine that a job pays for, and the meter after it."""

    instance: str
    before: Meter | None
    after: Meter
    lost_seconds: float = 0.0
    """Seconds of work in it that were lost with the machine."""

    @property
    def job(self) -> str | None:
        """Job that pays for the interval."""
        return self.before.job if self.before else None

    def amounts(self) -> dict[str, float]:
        """Return seconds and USD by ``pool|spot|doing|what``."""
        if self.before is None or self.before.job is None:
            return {}
        return _amounts(self.before, self.after.until - self.before.until, self.lost_seconds)


def opened(one: Instance, job: str | None, doing: Doing, now: float) -> Meter:
    """Return the first meter of a machine, which is paid for from its launch on."""
    since = min(one.launched_at, now)
    return _at_price(Meter(since, since, job, doing, one.pool, one.spot, 0.0, 0.0), one)


def charge(
    meter: Meter | None, one: Instance, job: str | None, doing: Doing, now: float
) -> Charge | None:
    """Return the charge for a listed machine, or None if none is due.

    ``job`` pays from ``now`` on; None keeps the current payer. The meter's job pays for the
    interval until ``now``.
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
    """Return the last charge for a machine that is gone, or None if its meter is closed.

    The machine was last listed at ``seen`` and costs at least ``billing_seconds``. Since
    ``unpushed`` it had trained what it never pushed.
    """
    if meter.closed:
        return None
    until = max(meter.until, seen, meter.since + billing_seconds)
    lost = 0.0
    if unpushed is not None and meter.doing is Doing.WORKING:
        lost = min(max(0.0, seen - unpushed), until - meter.since)
    return Charge(instance, meter, replace(meter, until=until, closed=True), lost)


def accrued(meter: Meter, now: float) -> float:
    """Return USD since the last charge."""
    return 0.0 if meter.closed else _usd(meter.price_per_hour, now - meter.until)


@dataclass(frozen=True)
class Waste:
    """Time and money that trained nothing."""

    seconds: float
    usd: float


@dataclass(frozen=True)
class PoolCost:
    """Costs of a job in one pool, by spot or on demand."""

    pool: str
    spot: bool
    seconds: float
    usd: float
    on_demand_usd: float


@dataclass(frozen=True)
class CostReport:
    """Costs of a job.

    ``on_demand_usd`` is the price of the same machines for the same time on demand. ``lost_work``
    is part of the working time; ``booting`` and ``idle`` aren't.
    """

    spent_usd: float
    on_demand_usd: float
    machine_seconds: float
    pools: tuple[PoolCost, ...]
    booting: Waste
    idle: Waste
    lost_work: Waste

    @property
    def saved_usd(self) -> float:
        """USD saved compared to on-demand machines."""
        return self.on_demand_usd - self.spent_usd


def report(amounts: Mapping[str, float]) -> CostReport:
    """Build a report from sums of :meth:`Charge.amounts`."""
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


def commitment(machines: Iterable[Instance], limits: Limits, now: float) -> float:
    """Return USD that machines still cost if they are given up at ``now`` (Unix seconds).

    Each costs until its worker has left and it is gone, and at least the cloud's minimum.
    """
    return sum(
        one.price_per_hour
        * max(limits.exit_seconds, limits.billing_seconds - (now - one.launched_at))
        / 3600
        for one in machines
    )


def affordable(budget: float | None, spent: float, committed: float) -> float | None:
    """Return USD that may still be committed, or None without a budget."""
    return None if budget is None else max(0.0, budget - spent - committed)


def pause_reason(
    budget: float | None,
    spent: float,
    committed: float,
    purpose: str = "spent until its machines are gone",
) -> str | None:
    """Return why the job must be paused now, or None if it may continue until the next check."""
    if budget is None or spent + committed < budget:
        return None
    return (
        f"{FIELD}: {spent:.4f} of {budget:g} USD are spent, and {committed:.4f} more would be "
        f"{purpose}; to continue, resume it with a larger budget"
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
