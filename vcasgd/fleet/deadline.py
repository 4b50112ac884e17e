"""Deadlines: when a job needs machines on demand to end in time; pure functions.

The *slack* of a job is the time that it can lose and still end in time, if all of its spot machines
are lost now and all of its places are filled on demand. A job waits for spot machines while it has
more slack than the *reserve*, which is what it is likely to lose with machines until the deadline.
Waiting longer costs nothing, because machines on demand cost the same later. Below the reserve,
places without a spot machine are filled on demand, and each machine is replaced once a spot machine
trains. A new spot machine takes its share of the slack, because losing it costs the time until
another one trains, so only as many are bought as there is slack for.

This differs from the rule *uniform progress* of "Can't Be Late: Optimizing Spot Instance Savings
under Deadlines" (Wu et al., NSDI 2024), which buys on demand as soon as a job is behind a straight
line, because there a machine is given up before the next one works.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, quantiles

from vcasgd.errors import SpecError
from vcasgd.fleet.observed import JobDemand, Rates
from vcasgd.fleet.plan.purchases import price_of
from vcasgd.schemas.costs import DeadlineEstimate, Offer
from vcasgd.schemas.fleet import Machine

#: Factor of the measured duration of the rest, for what isn't measured or gets slower.
WORK_MARGIN = 1.05
#: Part of the whole time that is left for the end: the last evaluation and checkpoint.
END_PART = 0.02
#: Losses of a whole fleet in an hour, for which slack is reserved. While machines are for sale,
#: recorded histories have 0.06, 0.5, and 0.9 (``benchmarks/cifar10/traces``).
LOSSES_PER_HOUR = 0.5
#: Mean seconds in which spot machines are for sale, and are not, in estimates: the geometric means
#: of those of two recorded zones, 1.8 and 2.2 hours, and 21 and 8 hours.
SOLD_SECONDS, REFUSED_SECONDS = 6 * 3600.0, 4 * 3600.0
#: Histories in an estimate, and steps in each.
HISTORIES, STEPS = 100, 400
#: Seconds after which a market that refused is asked again.
RETRY_SECONDS = 300.0


@dataclass(frozen=True)
class Outlook:
    """State of a job with a deadline. All times are seconds.

    ``left``: until it has to end, without the ``spare`` ones that are kept for its end. ``work``:
    the duration of the rest with all ``places`` filled. ``delay``: from the purchase of a machine
    until it trains. ``late``: the mean of the delays that are ahead if every place is filled on
    demand now.
    """

    left: float
    work: float
    places: int
    delay: float
    late: float
    spare: float = 0.0

    @property
    def slack(self) -> float:
        """Seconds that can be lost; below 0 the job may end too late."""
        return self.left - WORK_MARGIN * self.work - self.late

    @property
    def reserve(self) -> float:
        """Slack below which places are filled on demand."""
        return self.delay * (1 + LOSSES_PER_HOUR * max(0.0, self.left) / 3600)

    @property
    def spot(self) -> int | None:
        """Most new spot machines, if all other places are filled on demand; None: it waits."""
        if self.slack > self.reserve:
            return None
        part = self.slack / self.delay if self.delay else math.copysign(1.0, self.slack)
        return max(0, min(self.places, int(self.places * part)))

    @property
    def too_late(self) -> float:
        """Seconds after the deadline at which it ends at the measured speed; 0 if in time."""
        return max(0.0, self.work + self.late - self.left - self.spare)


def outlook(
    left: float,
    work: float,
    places: int,
    delay: float,
    ages: Iterable[float] = (),
    spare: float = 0.0,
) -> Outlook:
    """Return the outlook of a job whose machines on demand have these ages in seconds."""
    booted = sum(min(delay, max(0.0, age)) for age in sorted(ages, reverse=True)[:places])
    late = max(0.0, delay - booted / max(places, 1))
    return Outlook(left, work, places, delay, late, spare)


def with_deadline(
    demand: JobDemand, now: Outlook | None, unmeasured_after: float, spot: int
) -> JobDemand:
    """Return the demand of a job with a deadline.

    ``now`` is None while its speed is unknown. Then a fallback after ``unmeasured_after`` seconds
    of refusals makes sure that it is measured. ``spot``: its spot machines that stay.
    """
    if now is None:
        after = demand.fallback_after if demand.fallback_after is not None else unmeasured_after
        return replace(demand, minimum=max(1, demand.minimum), fallback_after=after, saves=True)
    if now.spot is None:
        after = math.inf if demand.fallback_after is None else demand.fallback_after
        return replace(demand, fallback_after=after, saves=True, outlook=now)
    firm = max(demand.on_demand_minimum, demand.desired - spot - now.spot)
    return replace(
        demand, minimum=demand.maximum, on_demand_minimum=firm, fallback_after=0.0, saves=True,
        outlook=now,
    )  # fmt: skip


def cheapest(offers: Iterable[Offer], rates: Rates) -> tuple[Offer, float] | None:
    """Return the offer with the cheapest sample on demand, and its samples/s; None if unknown.

    An offer without a rate is as fast as the median of all rates, if no offer has one.
    """
    offers = list(offers)
    known = {each: rates.get((each.pool, each.machine_type), 0.0) for each in offers}
    measured = {each: rate for each, rate in known.items() if rate > 0}
    others = [rate for rate in rates.values() if rate > 0]
    speeds = measured or (dict.fromkeys(offers, median(others)) if others else {})
    return min(
        speeds.items(), key=lambda each: price_of(each[0], spot=False) / each[1], default=None
    )


def delay_of(boots: Iterable[tuple[str, float]], start_seconds: float | None) -> float:
    """Return the longest time in which new machines of pools train.

    ``boots``: provider and ``boot_seconds`` of each pool. Local machines are given up as late as
    others, but are processes: they take at most twice the time that they have taken before.
    """
    local = math.inf if start_seconds is None else 2 * start_seconds
    return max(min(boot, local) if name == "local" else boot for name, boot in boots)


def ages_on_demand(machines: Iterable[Machine], now: float) -> list[float]:
    """Return the seconds since the launch of each machine on demand."""
    return [now - one.launched_at for one in machines if not one.spot]


def span(seconds: float) -> str:
    """Return a duration for people, such as ``3 h 10 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def outlook_text(now: Outlook | None, *, saves: bool = True) -> str:
    """Return the outlook for people. ``saves``: the job may have spot machines."""
    if now is None:
        return (
            "it is not known yet whether the job ends by its deadline: that needs its speed, and "
            "pools with prices"
        )
    if (left := now.left + now.spare) <= 0:
        return f"the deadline was missed {span(-left)} ago"
    if now.too_late:
        return (
            f"ends about {span(now.too_late)} after its deadline, even with {now.places} machines "
            "on demand"
        )
    if not saves:
        return f"ends in time: {span(max(0.0, now.slack))} of slack"
    if now.spot is None:
        return (
            f"waits for spot machines: {span(now.slack)} of slack, and below {span(now.reserve)} "
            "missing machines are bought on demand"
        )
    rest = span(now.slack) if now.slack > 0 else "none"
    return f"missing machines are bought on demand: {rest} of slack"


# -- simulation ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Work of a job on equal machines.

    ``seconds``: of one machine, for all of it. ``left``: seconds until the deadline. Prices are USD
    per hour.
    """

    seconds: float
    left: float
    places: int
    delay: float
    spot_price: float
    on_demand_price: float


@dataclass
class DeadlineRun:
    """Simulated run of a job. ``ended``: seconds since its start; None if it never ended."""

    usd: float = 0.0
    ended: float | None = None
    on_demand_seconds: float = 0.0


@dataclass
class _Fleet:
    #: Times of the launches.
    spot: list[float] = field(default_factory=list)
    firm: list[float] = field(default_factory=list)

    def working(self, work: Work, now: float) -> int:
        """Return the number of machines that have booted, at most one for each place."""
        up = [at for at in (*self.spot, *self.firm) if now - at >= work.delay]
        return min(work.places, len(up))


def simulate(
    work: Work,
    available: Sequence[int],
    step: float,
    rule: Callable[[Outlook, float], int | None] = lambda now, _: now.spot,
) -> DeadlineRun:
    """Run a job while so many spot machines are for sale in each ``step`` of so many seconds.

    ``rule`` returns :attr:`Outlook.spot` from the outlook and the part of the work that is done.
    The last machines that were bought are lost first. On-demand machines are always for sale.
    """
    fleet, run, rest, retry = _Fleet(), DeadlineRun(), work.seconds, 0.0
    for number, room in enumerate(available):
        now = number * step
        del fleet.spot[room:]
        done = step * fleet.working(work, now)
        part = min(1.0, rest / done) if done else 1.0
        rest -= part * done
        hours = part * step / 3600
        firm = len(fleet.firm)
        run.usd += hours * (len(fleet.spot) * work.spot_price + firm * work.on_demand_price)
        run.on_demand_seconds += part * step * firm
        if rest <= 1e-9:
            run.ended = now + part * step
            break
        end = now + step
        view = outlook(
            work.left - end, rest / work.places, work.places, work.delay,
            (end - at for at in fleet.firm),
        )  # fmt: skip
        most = rule(view, 1 - rest / work.seconds)
        wanted = work.places - len(fleet.spot)
        wanted = wanted if most is None else min(most, wanted)
        if wanted and end >= retry:
            got = max(0, min(wanted, room - len(fleet.spot)))
            fleet.spot += [end] * got
            retry = end + RETRY_SECONDS if got < wanted else 0.0
        missing = work.places - len(fleet.spot) - len(fleet.firm)
        if most is not None and missing > 0:
            fleet.firm += [end] * missing
        spare = fleet.working(replace(work, places=10**9), end) - work.places
        if spare > 0:
            del fleet.firm[:spare]
    return run


@dataclass(frozen=True)
class Chances:
    """Estimate over random histories of spot machines; money in USD, times in seconds.

    ``usd_high`` is exceeded in one of ten.
    """

    in_time: float
    usd: float
    usd_high: float
    seconds: float
    on_demand_seconds: float


def chances(work: Work, seed: int = 0) -> Chances:
    """Estimate how a job with a deadline ends, and its cost. The same seed gives the same result.

    Spot machines are for sale, and are not, for exponential times with the means
    :data:`SOLD_SECONDS` and :data:`REFUSED_SECONDS`.
    """
    step = max(work.left / STEPS, 1e-3)
    runs = [
        simulate(work, list(_sold(work.places, step, random.Random(f"{seed}/{n}"))), step)
        for n in range(HISTORIES)
    ]
    ended = [run.ended if run.ended is not None else 2 * work.left for run in runs]
    usd = [run.usd for run in runs]
    return Chances(
        in_time=fmean(at <= work.left for at in ended),
        usd=fmean(usd),
        usd_high=quantiles(usd, n=10)[-1],
        seconds=fmean(ended),
        on_demand_seconds=fmean(run.on_demand_seconds for run in runs),
    )


def estimated(work: Work, at: float, field: str) -> DeadlineEstimate:
    """Return the estimate for a deadline ``at`` (Unix seconds).

    Raises :class:`SpecError`, about ``field``, if it can't be kept with all places on demand.
    """
    view = outlook(work.left, work.seconds / work.places, work.places, work.delay)
    if view.too_late:
        remedy = f"give it more time: machines train {span(work.delay)} after their launch"
        if work.left > work.delay:
            enough = math.ceil(work.seconds / (work.left - work.delay))
            remedy = (
                f"set workers.max to {enough} or more, in pools that have as many machines, or "
                "give it more time"
            )
        raise SpecError(
            f"{field}: the job takes about {span(view.work + view.late)} with {work.places} "
            f"machines on demand, and {span(work.left / (1 - END_PART))} are left",
            remedy=remedy,
            field=field,
        )
    found = chances(work)
    hours = found.on_demand_seconds / 3600
    text = (
        f"in time in {found.in_time:.0%} of {HISTORIES} simulated histories of spot machines; "
        f"{found.usd:.2f} USD on average, and more than {found.usd_high:.2f} USD in one of ten; "
        f"{hours:.1f} machine hours on demand; {span(max(0.0, view.slack))} of slack now. Machines "
        "on demand must be for sale, and all as fast as measured"
    )
    return DeadlineEstimate(
        at=at,
        slack_seconds=view.slack,
        in_time=found.in_time,
        hours=found.seconds / 3600,
        cost_usd=found.usd,
        high_cost_usd=found.usd_high,
        on_demand_machine_hours=hours,
        text=text,
    )


def _sold(places: int, step: float, rng: random.Random) -> Iterator[int]:
    """Yield how many spot machines are for sale in each step."""
    sold, until = rng.random() < REFUSED_SECONDS / (SOLD_SECONDS + REFUSED_SECONDS), 0.0
    for number in range(2 * STEPS):
        while number * step >= until:
            sold = not sold
            until += rng.expovariate(1 / (SOLD_SECONDS if sold else REFUSED_SECONDS))
        yield places if sold else 0
