"""Purchases and replacements by the plan: prices, zones, quotas, and budgets."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.fleets import (
    NOW,
    Row,
    carried_out,
    decide,
    job,
    launch,
    machine,
    observed,
    offer,
    on,
    remembered,
)

from vcasgd.fleet.observed import Market, ObservationTimes, Observed, PoolStatus, with_history
from vcasgd.fleet.plan import Launch, StartWorker, StopWorker, Terminate
from vcasgd.fleet.plan.purchases import SPREAD_PREMIUM, scores
from vcasgd.schemas.costs import Offer


def pool(*offers: Offer, name: str = "local", **more: Any) -> PoolStatus:
    return PoolStatus(name, offers=offers, **more)


def refusing(seconds: float, *, blocked: bool = False) -> Market:
    """Return a market that has refused for this many seconds."""
    return Market(refused_since=NOW - seconds, blocked_until=NOW + 1 if blocked else 0.0)


TWO_ZONES = (offer("z1"), offer("z2"))
AB, ON_AB = [machine("a"), machine("b")], [on("a"), on("b")]
ONE = job("A", maximum=1)
SPOT_POOL = pool(*TWO_ZONES)
BLOCKED_SPOT = {
    ("z1", True): refusing(400, blocked=True),
    ("z2", True): refusing(400, blocked=True),
}
ALL_REFUSE = pool(*TWO_ZONES, markets=BLOCKED_SPOT)
SURE = pool(offer(pool="sure", spot=False, price=3.0), name="sure", spot=False)
FALLBACK = job("A", 1, 1, fallback_after=300.0)

TABLE = [
    Row("the cheapest type", observed(
        jobs=[ONE], pools=[pool(offer(price=1.0), offer(price=0.5, kind="other"))],
    ), [launch(1, kinds="other")]),
    Row("unmeasured, the price of a processor decides", observed(
        jobs=[ONE], pools=[pool(offer(price=1.0), offer(price=3.0, kind="large", cpus=16.0))],
    ), [launch(1, kinds="large")]),
    Row("measured, the price of a sample decides", observed(
        jobs=[job("A", maximum=1, rates={("local", "small"): 90.0, ("local", "large"): 100.0})],
        pools=[pool(offer(price=1.0), offer(price=3.0, kind="large", cpus=16.0))],
    ), [launch(1, kinds="small")]),
    Row("a pool that is about as good is used, too", observed(
        jobs=[ONE], pools=[pool(offer(price=1.0), offer(price=1.2, kind="other"))],
    ), [launch(1, kinds="other small")]),
    Row("machines are spread over zones", observed(
        jobs=[job("A", maximum=4)], pools=[SPOT_POOL],
    ), [launch(2, "z1"), launch(2, "z2")]),
    Row("the emptier zone first", observed(
        [machine("a", zone="z1"), machine("b", zone="z1")], ON_AB, [job("A", maximum=4)],
        pools=[SPOT_POOL],
    ), [launch(2, "z2")]),
    Row("but not at any price", observed(
        [machine("a", zone="z1")], [on("a")], [job("A", maximum=2)],
        pools=[pool(offer("z1"), offer("z2", 1 + SPREAD_PREMIUM + 0.01))],
    ), [launch(1, "z1")]),
    Row("a zone that refused is left alone, the other one is asked", observed(
        jobs=[job("A", maximum=2)],
        pools=[pool(*TWO_ZONES, markets={("z1", True): refusing(1, blocked=True)})],
    ), [launch(2, "z2")]),
    Row("all zones refuse: the next pool", observed(
        jobs=[job("A", maximum=2, pools=("local", "next"))],
        pools=[ALL_REFUSE, pool(offer(pool="next"), name="next")],
    ), [launch(2, pool="next")]),
    Row("a market's own count makes the token", observed(
        jobs=[ONE], pools=[pool(offer(), markets={("z", True): Market(launches=5)})],
    ), [launch(1, launches=5)]),
    Row("nothing above the pool's maximum", observed(
        jobs=[job("A", maximum=2)],
        pools=[pool(offer("z1", 2.0), offer("z2", 0.9, "tiny", cpus=0.1), max_price_per_hour=1.0)],
    ), [launch(2, "z2", "tiny")]),
    Row("nothing above the job's maximum", observed(
        jobs=[job("A", maximum=2, max_price=0.5)], pools=[SPOT_POOL],
    ), []),
    Row("nothing before the prices are known", replace(
        observed(jobs=[ONE]), pools=(PoolStatus("local"),),
    ), []),
    Row("a quota caps the pool", observed(
        [machine("a", zone="z1")], [on("a")], [job("A", maximum=4)],
        pools=[pool(*TWO_ZONES, quotas={True: 2})],
    ), [launch(1, "z2")]),
    Row("a quota of another kind does not", observed(
        jobs=[ONE], pools=[pool(offer(), quotas={False: 0})],
    ), [launch(1)]),
    Row("the minimum without risk", observed(
        jobs=[job("A", 1, 3, on_demand_minimum=1)], pools=[pool(offer())],
    ), [launch(1, spot=False), launch(2)]),
    Row("the minimum without risk is there", observed(
        [machine("a", spot=False), machine("b")], ON_AB, [job("A", 1, 2, on_demand_minimum=1)],
        pools=[pool(offer())],
    ), []),
    Row("a spot machine is not stopped before the one without risk is there", observed(
        AB, ON_AB, [job("A", 1, 2, on_demand_minimum=1)], pools=[pool(offer())],
        history=ObservationTimes(0.0, surplus={"A": NOW - 100}),
    ), [launch(1, spot=False)]),
    Row("an idle spot machine is none without risk", observed(
        [machine("a")], jobs=[job("A", 1, 1, on_demand_minimum=1)], pools=[pool(offer())],
    ), [launch(1, spot=False)]),
    Row("no fallback while a zone may still have one", observed(
        jobs=[FALLBACK],
        pools=[pool(*TWO_ZONES, markets={("z1", True): refusing(400, blocked=True)})],
    ), [launch(1, "z2")]),
    Row("no fallback before its time", observed(
        jobs=[job("A", 1, 1, fallback_after=401.0)], pools=[ALL_REFUSE],
    ), []),
    Row("no fallback unless wanted", observed(jobs=[job("A", 1, 1)], pools=[ALL_REFUSE]), []),
    Row("the fallback, for the minimum only", observed(
        jobs=[job("A", 1, 4, fallback_after=300.0)], pools=[ALL_REFUSE],
    ), [launch(1, "z1", spot=False)]),
    Row("a pool that is refused as a whole", observed(
        jobs=[FALLBACK], pools=[pool(*TWO_ZONES, refused_since=NOW - 400)],
    ), [launch(1, "z1")]),
    Row("the fallback works while spot is refused", observed(
        [machine("a", spot=False, price=3.0)], [on("a")], [FALLBACK], pools=[ALL_REFUSE],
    ), []),
    Row("a spot machine is ordered in its place once there is one", observed(
        [machine("a", spot=False, price=3.0)], [on("a")], [FALLBACK], pools=[SPOT_POOL],
    ), [launch(1, "z1")]),
    Row("it works on until then", observed(
        [machine("a", spot=False, price=3.0), machine("b")], [on("a")], [FALLBACK],
        pools=[SPOT_POOL], nodes="a",
    ), []),
    Row("and goes when the other one works", observed(
        [machine("a", spot=False, price=3.0), machine("b")], ON_AB, [FALLBACK], pools=[SPOT_POOL],
        history=ObservationTimes(0.0, surplus={"A": NOW - 15}),
    ), [StopWorker("A@a", "no work for it")]),
    Row("one of the fallback is not replaced by another one", observed(
        [machine(name, spot=False, price=3.0) for name in "ab"], ON_AB,
        [job("A", 2, 2, fallback_after=0.0)], pools=[pool(*TWO_ZONES, quotas={True: 1})],
    ), [launch(1, "z1")]),
    Row("a spot machine that waits replaces one of them while the market refuses", observed(
        [*(machine(name, spot=False, price=3.0) for name in "ab"), machine("c")], ON_AB,
        [job("A", 2, 2, fallback_after=0.0)], pools=[ALL_REFUSE],
    ), [StartWorker("c", "A")]),
    Row("and one on demand that waits replaces none", observed(
        [machine(name, spot=False, price=3.0) for name in "abc"], ON_AB,
        [job("A", 2, 2, fallback_after=0.0)], pools=[pool(*TWO_ZONES, quotas={True: 1})],
    ), [launch(1, "z1")]),
    Row("a job with slack waits for spot machines", observed(
        jobs=[job("A", 1, 2, pools=("sure", "local"), saves=True, fallback_after=math.inf)],
        pools=[ALL_REFUSE, SURE],
    ), []),
    Row("without slack, places that no spot machine takes are filled on demand", observed(
        jobs=[job("A", 2, 2, pools=("sure", "local"), saves=True, fallback_after=0.0)],
        pools=[pool(*TWO_ZONES, capacity=1), SURE],
    ), [launch(1, "z1"), launch(1, pool="sure", spot=False)]),
    Row("and each is replaced once there is a spot machine", observed(
        [machine("a", spot=False, price=3.0, pool="sure"), machine("b")], ON_AB,
        [job("A", 2, 2, pools=("sure", "local"), saves=True, fallback_after=0.0)],
        pools=[SPOT_POOL, SURE],
    ), [launch(1, "z1")]),
    Row("unless no slack is left", observed(
        [machine("a", spot=False, price=3.0, pool="sure"), machine("b")], ON_AB,
        [job("A", 3, 3, pools=("sure", "local"), saves=True, fallback_after=0.0,
             on_demand_minimum=2)],
        pools=[SPOT_POOL, SURE],
    ), [launch(1, pool="sure", spot=False)]),
    Row("a replacement is ordered at the advice", observed(
        [machine("a", advised_at=NOW), machine("b")], ON_AB, [job("A", maximum=2)],
    ), [launch(1)]),
    Row("the advised one works on where there is none", observed(
        [machine("a", advised_at=NOW - 9_000)], [on("a")], [ONE],
        pools=[PoolStatus("local", blocked_until=NOW + 1)],
    ), []),
    Row("the advised one goes when its replacement works", observed(
        [machine("a", advised_at=NOW), machine("b")], ON_AB, [ONE],
        history=ObservationTimes(0.0, surplus={"A": NOW - 15}),
    ), [StopWorker("A@a", "no work for it")]),
    Row("nothing new starts on an advised machine", observed(
        [machine("a", advised_at=NOW)], jobs=[ONE],
    ), [Terminate("a", "the cloud recommends leaving it"), launch(1)]),
    Row("dear for a moment", observed(
        [machine("a", price=2.0)], [on("a")], [job("A", maximum=1, max_price=1.0)],
        pools=[pool(offer(price=2.0))], history=ObservationTimes(0.0, dear={"a": NOW - 599}),
    ), []),
    Row("dear for too long", observed(
        [machine("a", price=2.0)], [on("a")], [job("A", maximum=1, max_price=1.0)],
        pools=[pool(offer(price=2.0))], history=ObservationTimes(0.0, dear={"a": NOW - 600}),
    ), [StopWorker("A@a", "its machine costs more than max_price_per_hour")]),
    Row("an idle machine that is too dear is not used", observed(
        [machine("a", price=2.0)], jobs=[job("A", maximum=1, max_price=1.0)],
        pools=[pool(offer(price=2.0))],
    ), []),
    Row("the budget pays for so many machines", observed(
        jobs=[job("A", maximum=4, affordable=2.5 / 60)], pools=[pool(offer())],
    ), [launch(2)]),
    Row("what a job with a budget no longer works on ends at once", replace(
        observed(AB, jobs=[job("A", running=False)], nodes="a"),
        unpaid={"a": "A is paused", "b": "A is paused"},
    ), [Terminate("a", "A is paused"), Terminate("b", "A is paused")]),
    Row("unless another job has a use for it", replace(
        observed(AB, nodes="a", jobs=[job("A", running=False), job("B", maximum=2)]),
        unpaid={"a": "A is paused", "b": "A is paused"},
    ), [StartWorker("a", "B")]),
    Row("a pool that may not see the data any more", observed(
        [machine("a"), machine("b", pool="safe")], ON_AB,
        [job("A", maximum=2, pools=("safe",), barred=frozenset({"local"}))],
        pools=[PoolStatus("local"), PoolStatus("safe")],
    ), [Terminate("a", "pool local may not see the data of A"), launch(1, pool="safe")]),
    Row("nor keep what is cached there", replace(
        observed([machine("a")], jobs=[job("A", maximum=0, pools=(), barred=frozenset({"local"}))]),
        payers={"a": "A"},
    ), [Terminate("a", "pool local may not see the data of A")]),
    Row("a machine of such a pool is not handed over", observed(
        [machine("a")], [on("a", "B")],
        [job("A", 1, 1, pools=(), barred=frozenset({"local"})), job("B", 0, 1)],
    ), []),
    Row("no worker runs: nothing is kept", observed(
        AB, history=ObservationTimes(0.0, idle={"a": NOW - 61, "b": NOW - 61}),
    ), [Terminate("a", "idle"), Terminate("b", "idle")]),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=[row.case for row in TABLE])
def test_decide(row: Row) -> None:
    assert decide(remembered(row.state), NOW) == row.actions


def test_a_type_is_guessed_from_those_that_were_measured() -> None:
    known, unknown = offer(price=1.0), offer(price=1.0, kind="double", cpus=8.0)
    found = scores([known, unknown], {("local", "small"): 10.0}, spot=True)

    assert found == {known: pytest.approx(0.1), unknown: pytest.approx(0.05)}


def test_a_rate_of_another_pool_says_nothing() -> None:
    one = offer(price=2.0)
    assert scores([one], {("other", "small"): 10.0}, spot=True) == {one: 2.0 / 4}


def test_losing_a_zone_costs_at_most_its_share() -> None:
    zones = [f"z{number}" for number in range(4)]
    state = observed(jobs=[job("A", maximum=16)], pools=[pool(*(offer(zone) for zone in zones))])

    bought = Counter(
        {each.zone: each.count for each in decide(state, NOW) if isinstance(each, Launch)}
    )

    assert bought == dict.fromkeys(zones, 4)


@dataclass
class Swinging:
    """Fleet whose prices swing every ``period`` seconds between two values."""

    low: float
    high: float
    period: float
    max_price: float | None = None
    moved: int = 0

    def run(self, seconds: float = 6 * 3600, step: float = 60.0) -> None:
        state = self._priced(observed(jobs=[job("A", maximum=4, max_price=self.max_price)]), NOW)
        now = NOW
        while now < NOW + seconds:
            state = with_history(self._priced(state, now), now)
            actions = decide(state, now)
            self.moved += sum(isinstance(action, StopWorker) for action in actions)
            state = carried_out(state, actions, now)
            now += step

    def _price(self, zone: str, now: float) -> float:
        swings = int((now - NOW) / self.period) + (zone == "z2")
        return self.high if swings % 2 else self.low

    def _priced(self, state: Observed, now: float) -> Observed:
        prices = {zone: self._price(zone, now) for zone in ("z1", "z2")}
        return replace(
            state,
            pools=(pool(*(offer(zone, price) for zone, price in prices.items())),),
            machines=tuple(
                one.model_copy(update={"price_per_hour": prices[one.zone]})
                for one in state.machines
            ),
        )


@pytest.mark.parametrize("period", [60.0, 600.0, 3600.0])
def test_prices_that_swing_move_no_machine(period: float) -> None:
    fleet = Swinging(0.5, 5.0, period)
    fleet.run()
    assert fleet.moved == 0


def test_prices_that_swing_around_the_maximum_faster_than_the_patience_move_none() -> None:
    fleet = Swinging(0.9, 1.1, period=570.0, max_price=1.0)
    fleet.run()
    assert fleet.moved == 0


def test_slower_ones_move_a_machine_at_most_once_a_swing() -> None:
    fleet = Swinging(0.9, 1.1, period=3600.0, max_price=1.0)
    fleet.run()
    assert 0 < fleet.moved <= 4 * 6
