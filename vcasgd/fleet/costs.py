"""Accounting of machine costs, and budgets; pure functions.

Each machine has a *meter*: until when it is paid for, by which job, and what it does. A *charge*
advances a meter when that changes. In between, a machine is paid for up to the *clock* of its job,
so that one booking pays for all machines of a job. A charge is valid only together with the meter
and the clock that it starts from, so one that is booked under that condition is booked once,
however often it is repeated.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from vcasgd.fleet.observed import Limits
from vcasgd.schemas.costs import CostReport, PoolCostView, WastedView, WasteView
from vcasgd.schemas.fleet import Machine

#: Seconds by which the clock of a job advances at least. Booking writes to disk, and
#: :func:`accrued` counts what is not booked yet.
CHARGE_SECONDS = 10.0


class Doing(StrEnum):
    """Activity of a machine. One that waits in a queue of its cluster isn't paid for."""

    WAITING = "waiting"
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
    running: bool = False
    """True if the machine is also paid for up to the clock of its job."""

    def paid_until(self, clock: float) -> float:
        """Return until when the machine is paid for; ``clock`` is that of its job."""
        return max(self.until, clock) if self.running else self.until

    def to_json(self) -> str:
        """Return the stored form."""
        fields = {name: value for name, value in vars(self).items() if name != "running" or value}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Meter:
        """Parse the stored form."""
        fields = json.loads(text)
        return cls(**{**fields, "doing": Doing(fields["doing"])})


@dataclass(frozen=True)
class Charge:
    """Interval of one machine that a job pays for, and the meter after it.

    ``since``: until when the machine was paid for before.
    """

    machine: str
    before: Meter | None
    after: Meter
    since: float
    lost_seconds: float = 0.0
    """Seconds of work in it that were lost with the machine."""

    @property
    def job(self) -> str | None:
        """Job that pays for the interval."""
        return self.before.job if self.before else None

    def amounts(self) -> dict[str, float]:
        """Return seconds and USD by ``pool|spot|doing|what``."""
        # A machine that waits now has waited since its launch.
        if self.before is None or self.before.job is None or self.after.doing is Doing.WAITING:
            return {}
        return _amounts(self.before, self.after.until - self.since, self.lost_seconds)


def opened(one: Machine, job: str | None, doing: Doing, now: float) -> Meter:
    """Return the first meter of a machine, which is paid for from its launch on."""
    since = min(one.launched_at, now)
    return _at_price(Meter(since, since, job, doing, one.pool, one.spot, 0.0, 0.0), one)


def charge(
    meter: Meter | None, one: Machine, job: str | None, doing: Doing, now: float, clock: float
) -> Charge | None:
    """Return the charge for a listed machine, or None if only the clock has to advance.

    ``job`` pays from ``now`` on; None keeps the current payer. The meter's job, whose clock is at
    ``clock``, pays for the interval until ``now``, which no clock of a job has passed.
    """
    if meter is None:
        first = opened(one, job, doing, now)
        return Charge(one.id, None, first, first.until)
    if _is_same(meter, one, job, doing):
        return None
    since = meter.paid_until(clock)
    after = replace(
        meter, until=max(since, now), job=job or meter.job, doing=doing, closed=False, running=True
    )
    return Charge(one.id, meter, _at_price(after, one), since)


def _is_same(meter: Meter, one: Machine, job: str | None, doing: Doing) -> bool:
    return (
        meter.running
        and meter.doing is doing
        and meter.price_per_hour == one.price_per_hour
        and (job is None or meter.job == job)
    )


def last_charge(
    machine: str,
    meter: Meter,
    seen: float,
    billing_seconds: float,
    unpushed: float | None,
    clock: float,
) -> Charge | None:
    """Return the last charge for a machine that is gone, or None if its meter is closed.

    The machine was last listed at ``seen`` and costs at least ``billing_seconds``. Since
    ``unpushed`` it had trained what it never pushed. ``clock`` is that of its job.
    """
    if meter.closed:
        return None
    since = meter.paid_until(clock)
    until = max(since, seen, meter.since + billing_seconds)
    lost = 0.0
    if unpushed is not None and meter.doing is Doing.WORKING:
        lost = min(max(0.0, seen - unpushed), until - meter.since)
    after = replace(meter, until=until, closed=True, running=False)
    return Charge(machine, meter, after, since, lost)


def clock_amounts(meters: Iterable[Meter], clock: float, now: float) -> dict[str, float]:
    """Return what a job pays for its machines while its clock advances to ``now``.

    The amounts are the sums of those of a :class:`Charge` for each running meter.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for each in meters:
        if each.running and each.until < now:
            for name, amount in _amounts(each, now - max(each.until, clock), 0.0).items():
                sums[name] += amount
    return dict(sums)


def accrued(meter: Meter, now: float, clock: float) -> float:
    """Return USD since the machine was paid for; ``clock`` is that of its job."""
    free = meter.closed or meter.doing is Doing.WAITING
    return 0.0 if free else _usd(meter.price_per_hour, now - meter.paid_until(clock))


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
        seconds, usd, on_demand = (
            sum(row[what] for row in rows) for what in ("seconds", "usd", "on_demand_usd")
        )
        pools.append(
            PoolCostView(
                pool=pool, spot=kind == "spot", seconds=seconds, usd=usd, on_demand_usd=on_demand
            )
        )

    def waste(doing: Doing, prefix: str = "") -> WasteView:
        rows = [row for key, row in sums.items() if key[2] == doing]
        return WasteView(
            seconds=sum(row[f"{prefix}seconds"] for row in rows),
            usd=sum(row[f"{prefix}usd"] for row in rows),
        )

    spent, on_demand = sum(each.usd for each in pools), sum(each.on_demand_usd for each in pools)
    return CostReport(
        spent_usd=spent,
        on_demand_usd=on_demand,
        saved_usd=on_demand - spent,
        machine_seconds=sum(each.seconds for each in pools),
        pools=pools,
        wasted=WastedView(
            booting=waste(Doing.BOOTING),
            idle=waste(Doing.IDLE),
            lost_work=waste(Doing.WORKING, "lost_"),
        ),
    )


def commitment(machines: Iterable[Machine], limits: Limits, now: float) -> float:
    """Return USD that machines still cost if they are given up at ``now`` (Unix seconds).

    Each costs until its worker has left and it is gone, and at least the cloud's minimum.
    """
    return sum(
        one.price_per_hour
        * max(limits.exit_seconds, limits.billing_seconds - (now - one.launched_at))
        / 3600
        for one in machines
    )


@dataclass(frozen=True)
class Budget:
    """Budget in USD of a job, or of a calendar month of the cluster or of the jobs of a user.

    ``spent`` counts against it. ``committed``: what the present machines still cost if they are
    given up now. ``remedy``: how a job that was paused continues. ``jobs``: the number of jobs that
    share the rest.
    """

    field: str
    usd: float
    spent: float
    committed: float
    remedy: str
    jobs: int = 1

    @property
    def affordable(self) -> float:
        """USD that each of the jobs may still commit."""
        return max(0.0, self.usd - self.spent - self.committed) / max(self.jobs, 1)

    def pause_reason(self, own: float, least: float) -> str | None:
        """Return why a job must be paused now, or None if it may continue until the next check.

        ``own``: what its machines are committed to; ``least``: the cost of the cheapest machine, if
        it has none. A job whose machines cost nothing goes on.
        """
        if own > 0:
            more, purpose = self.committed, "spent until its machines are gone"
        elif least > 0:
            more, purpose = self.committed + least, "the least that a machine costs"
        else:
            return None
        if self.spent + more < self.usd:
            return None
        return (
            f"{self.field}: {self.spent:.4f} of {self.usd:g} USD are spent, and {more:.4f} more "
            f"would be {purpose}; to continue, {self.remedy}"
        )


def monthly_budgets(
    limits: Mapping[str | None, float],
    spent: Mapping[str, float],
    committed: Mapping[str | None, float],
    jobs: Mapping[str | None, int],
) -> dict[str | None, Budget]:
    """Return the budgets of users by their names, and that of the cluster as None.

    ``limits`` has those in USD. ``spent``, ``committed``, and ``jobs`` are those of each user; an
    empty name, and None, stand for jobs without one.
    """
    budgets: dict[str | None, Budget] = {}
    for user, usd in limits.items():
        every = user is None
        budgets[user] = Budget(
            field="VCASGD_MONTHLY_BUDGET_USD" if every else f"max_usd_per_month of {user}",
            usd=usd,
            spent=sum(spent.values()) if every else spent.get(user or "", 0.0),
            committed=sum(committed.values()) if every else committed.get(user, 0.0),
            remedy="resume it next month, or after an administrator has raised the budget",
            jobs=sum(jobs.values()) if every else jobs.get(user, 0),
        )
    return budgets


def _at_price(meter: Meter, one: Machine) -> Meter:
    return replace(
        meter,
        price_per_hour=one.price_per_hour,
        on_demand_price_per_hour=one.on_demand_price_per_hour,
    )


def _amounts(meter: Meter, seconds: float, lost: float) -> dict[str, float]:
    if meter.doing is Doing.WAITING:
        return {}
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
