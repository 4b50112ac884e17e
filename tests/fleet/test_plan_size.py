"""The plan for large fleets: same decisions as a search, and work in proportion to the fleet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import NOW, decide, job, leaving, machine, observed, offer, on
from support.work import calls_of

from vcasgd.fleet.observed import ObservationTimes, Observed, PoolStatus, with_history
from vcasgd.fleet.plan import Launch, StartWorker, StopWorker, Terminate
from vcasgd.fleet.plan.shares import ANY, ON_DEMAND, Stock, worth
from vcasgd.schemas.fleet import Machine

#: Four times the fleet may cost this many times the work; sorting adds a little.
LINEAR = 5.0
POOLS = ("a", "b", "c")

machines = st.lists(
    st.builds(
        lambda pool, spot, price, age, advised: machine(
            "", pool=pool, spot=spot, price=price, age=age, advised_at=NOW if advised else None
        ),
        st.sampled_from(POOLS),
        st.booleans(),
        st.integers(1, 4).map(float),
        st.integers(0, 3).map(float),
        st.booleans(),
    ),
    max_size=12,
).map(lambda found: [one.model_copy(update={"id": f"m{at}"}) for at, one in enumerate(found)])
requests = st.lists(
    st.tuples(
        st.lists(st.sampled_from(POOLS), unique=True), st.integers(0, 5), st.booleans()
    ),
    max_size=12,
)  # fmt: skip


@given(machines, requests)
def test_stock_takes_what_a_search_finds(
    fleet: list[Machine], wishes: list[tuple[list[str], int, bool]]
) -> None:
    stock, left = Stock([(one, one.id) for one in fleet], lambda _: None), list(fleet)
    for pools, limit, on_demand in wishes:
        fitting = [
            one
            for one in left
            if one.pool in pools
            and one.advised_at is None
            and not (on_demand and one.spot)
            and one.price_per_hour <= limit
        ]
        expected = min(fitting, key=worth, default=None)
        spots = ON_DEMAND if on_demand else ANY
        taken = stock.take(pools, lambda *_, most=limit: float(most), spots)
        assert taken == (expected.id if expected else None)
        left = [one for one in left if one is not expected]


def idle(count: int) -> Observed:
    """Idle machines at many prices, and twenty jobs that want all of them."""
    fleet = [machine(f"m{at}", price=1 + at % 97 / 97) for at in range(count)]
    jobs = [job(f"J{at}", maximum=count, wants=count // 20) for at in range(20)]
    return with_history(observed(fleet, jobs=jobs), NOW)


def lost(count: int) -> Observed:
    """Machines of twenty jobs that all receive a notice at once; three zones sell others."""
    fleet = [leaving(f"m{at}") for at in range(count)]
    jobs = [
        job(f"J{at}", minimum=count // 40, maximum=count, wants=count // 20) for at in range(20)
    ]
    workers = [on(one.id, f"J{at % 20}") for at, one in enumerate(fleet)]
    offers = tuple(offer(zone, 0.1, kind) for zone in "abc" for kind in ("small", "large"))
    return with_history(
        observed(fleet, workers, jobs, pools=[PoolStatus("local", offers=offers)]), NOW
    )


def claimed(count: int) -> Observed:
    """Machines of one job above its minimum, half of which another job needs."""
    fleet = [machine(f"m{at}") for at in range(count)]
    jobs = [job("A", maximum=count, wants=count), job("B", count // 2, count, wants=count)]
    pools = [PoolStatus("local", capacity=count)]
    workers = [on(one.id) for one in fleet]
    return with_history(observed(fleet, workers, jobs, pools=pools), NOW)


def shared(count: int) -> Observed:
    """Machines that low jobs have held for long, half of which others should get."""
    fleet = [machine(f"m{at}") for at in range(count)]
    low = [job(f"L{at}", maximum=count, wants=count, priority=-1) for at in range(10)]
    late = [
        job(f"J{at}", maximum=count, wants=count // 20, weight=1.0 + at % 3) for at in range(10)
    ]
    workers = [on(one.id, f"L{at % 10}") for at, one in enumerate(fleet)]
    history = ObservationTimes(
        0.0, held=dict.fromkeys((each.name for each in workers), 0.0),
        short=dict.fromkeys((each.job for each in late), 0.0),
    )  # fmt: skip
    pools = [PoolStatus("local", capacity=count)]
    return with_history(observed(fleet, workers, low + late, pools=pools, history=history), NOW)


def surplus(count: int) -> Observed:
    """Workers beyond what their job wants, half of whose machines another job wants."""
    fleet = [machine(f"m{at}") for at in range(count)]
    jobs = [job("A", maximum=count, wants=0), job("B", maximum=count, wants=count // 2)]
    return with_history(observed(fleet, [on(one.id) for one in fleet], jobs), NOW)


@pytest.mark.parametrize(
    ("fleet", "kind", "share"),
    [(idle, StartWorker, 1.0), (lost, Launch, 0.0), (claimed, StopWorker, 0.5),
     (shared, StopWorker, 0.5), (surplus, StopWorker, 0.5)],
)  # fmt: skip
def test_work_of_a_decision_grows_with_the_fleet_and_not_its_square(
    fleet: Callable[[int], Observed], kind: type, share: float
) -> None:
    small, large = fleet(200), fleet(800)
    actions = [each for each in decide(large, NOW) if isinstance(each, kind)]
    assert len(actions) >= max(1, share * 800)
    assert calls_of(lambda: decide(large, NOW)) < LINEAR * calls_of(lambda: decide(small, NOW))


def test_jobs_without_any_machine_cost_nothing_for_each_place() -> None:
    def waiting(places: int) -> Observed:
        full = [PoolStatus("local", capacity=0)]
        return observed(jobs=[job("A", places, places, wants=places)], pools=full)

    assert not decide(waiting(10_000), NOW)
    assert calls_of(lambda: decide(waiting(10_000), NOW)) == calls_of(
        lambda: decide(waiting(10), NOW)
    )


def test_all_lost_machines_are_replaced_in_one_decision() -> None:
    state = lost(1000)
    launched = sum(each.count for each in decide(state, NOW) if isinstance(each, Launch))
    assert launched == 1000
    assert not [each for each in decide(state, NOW) if isinstance(each, Terminate)]
