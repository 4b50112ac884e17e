"""Priorities, weights, and preemption: the plan over many rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fleets import LIMITS, NOW, carried_out, decide, job, machine, observed, on, selling

from vcasgd.fleet.observed import JobDemand, ObservationTimes, Observed, PoolStatus, with_history
from vcasgd.fleet.plan import StopWorker
from vcasgd.fleet.plan.decide import Waiting, make_plan

ROUND_SECONDS = 30.0
#: Rounds without a loss or a change after which machines must no longer move.
QUIET = 60
HIGH, NORMAL, LOW = 1, 0, -1


@dataclass(frozen=True)
class Taking:
    """A machine that was taken from one job for another one."""

    machine: str
    donor: str
    successor: str
    at: float
    for_minimum: bool


@dataclass
class Fleet:
    """A fleet in which workers leave one round after they were asked to."""

    state: Observed
    now: float = NOW
    takings: list[Taking] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        return Counter(each.job for each in self.state.workers)

    def set_jobs(self, *jobs: JobDemand) -> None:
        self.state = replace(self.state, jobs=jobs)

    def lose(self, id_: str) -> None:
        self.state = replace(
            self.state,
            machines=tuple(one for one in self.state.machines if one.id != id_),
            workers=tuple(one for one in self.state.workers if one.machine_id != id_),
        )
        self.state = replace(self.state, nodes=frozenset(one.id for one in self.state.machines))

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def round(self) -> None:
        self.now += ROUND_SECONDS
        self.state = with_history(self.state, self.now)
        actions = decide(self.state, self.now)
        workers = {one.name: one for one in self.state.workers}
        for action in actions:
            if isinstance(action, StopWorker) and action.successor is not None:
                one, least = workers[action.name], action.reason.endswith("minimum")
                self.takings.append(
                    Taking(one.machine_id, one.job, action.successor, self.now, least)
                )
        self.state = carried_out(self.state, actions, self.now)
        self._check_limits()

    def _check_limits(self) -> None:
        for pool in self.state.pools:
            held = sum(one.pool == pool.name for one in self.state.machines)
            assert pool.capacity is None or held <= pool.capacity
        for one in self.state.jobs:
            assert self.counts()[one.job] <= one.maximum


def fleet(capacity: int, *jobs: JobDemand) -> Fleet:
    pools = [PoolStatus("local", capacity=capacity)]
    return Fleet(observed(jobs=list(jobs), pools=pools))


# -- cases ---------------------------------------------------------------------------------------


def shares(capacity: int, *jobs: JobDemand) -> dict[str, int]:
    """Return the machines of each job once nothing moves any more."""
    one = fleet(capacity, *jobs)
    one.rounds(QUIET)
    return {each.job: one.counts()[each.job] for each in jobs}


@pytest.mark.parametrize(
    ("capacity", "jobs", "expected"),
    [
        (10, [job("A", maximum=9), job("B", maximum=9)], {"A": 5, "B": 5}),
        (9, [job("A", maximum=9), job("B", maximum=9, weight=2.0)], {"A": 3, "B": 6}),
        (9, [job("A", maximum=2), job("B", maximum=9), job("C", maximum=9)],
         {"A": 2, "B": 4, "C": 3}),
        (9, [job("A", 5, 9), job("B", maximum=9), job("C", maximum=9)], {"A": 5, "B": 2, "C": 2}),
        (9, [job("A", 1, 9, priority=LOW), job("B", 1, 9), job("C", 1, 6, priority=HIGH)],
         {"A": 1, "B": 2, "C": 6}),
        (3, [job("A", 0, 9, priority=LOW), job("B", 0, 9, priority=HIGH)], {"A": 0, "B": 3}),
        (7, [job("A", maximum=9, weight=0.5), job("B", maximum=9, weight=3.0)], {"A": 1, "B": 6}),
    ],
)  # fmt: skip
def test_machines_are_shared(
    capacity: int, jobs: list[JobDemand], expected: dict[str, int]
) -> None:
    assert shares(capacity, *jobs) == expected


@pytest.mark.parametrize("late", [job("B", 0, 4), job("B", 0, 4, priority=HIGH)])
def test_machines_move_once_to_a_job_that_comes_later(late: JobDemand) -> None:
    one = fleet(4, job("A", 0, 4))
    one.rounds(QUIET)
    one.set_jobs(job("A", 0, 4), late)
    one.rounds(QUIET)
    moved = 4 if late.priority else 2
    assert one.counts() == Counter({"A": 4 - moved, "B": moved}) - Counter()
    assert len({each.machine for each in one.takings}) == len(one.takings) == moved


def test_machine_is_not_taken_while_another_one_can_be_bought() -> None:
    one = fleet(8, job("A", 0, 4))
    one.rounds(QUIET)
    one.set_jobs(job("A", 0, 4), job("B", 0, 4, priority=HIGH))
    one.rounds(QUIET)
    assert one.counts() == Counter({"A": 4, "B": 4})
    assert not one.takings


def held(seconds: float, waited: float) -> Observed:
    """Return a machine of a low job, held for some seconds, that a high job has waited for."""
    jobs = [job("A", priority=LOW), job("B", priority=HIGH)]
    history = ObservationTimes(0.0, held={"A@a": NOW - seconds}, short={"B": NOW - waited})
    full = [PoolStatus("local", capacity=1)]
    return with_history(observed([machine("a")], [on("a")], jobs, pools=full, history=history), NOW)


TAKEN = StopWorker("A@a", "its machine is reassigned to B, which has a higher priority", "B")


@pytest.mark.parametrize(
    ("state", "actions"),
    [
        (held(LIMITS.hold_seconds, LIMITS.claim_seconds), [TAKEN]),
        (held(LIMITS.hold_seconds - 1, LIMITS.claim_seconds), []),
        (held(LIMITS.hold_seconds, LIMITS.claim_seconds - 1), []),
        (replace(held(900, 900), draining={"A@a": "B"}), []),
    ],
)
def test_machine_is_taken_after_a_time(state: Observed, actions: list[StopWorker]) -> None:
    assert decide(state, NOW) == actions


def test_only_an_on_demand_machine_serves_an_on_demand_minimum() -> None:
    fleet_ = [machine("a", price=2), machine("b", spot=False)]
    jobs = [job("A", 0, 2), job("B", 1, 1, on_demand_minimum=1)]
    full = [PoolStatus("local", capacity=2)]
    state = observed(fleet_, [on("a"), on("b")], jobs, pools=full)
    stops = [each for each in decide(with_history(state, NOW), NOW) if isinstance(each, StopWorker)]
    assert [each.name for each in stops] == ["A@b"]


def test_a_dearer_machine_than_its_price_is_no_use_to_a_job() -> None:
    fleet_ = [machine("a", price=1), machine("b", price=2), machine("c", price=3)]
    jobs = [job("A", 0, 3), job("B", 1, 1, max_price=2.0)]
    full = [PoolStatus("local", capacity=3)]
    state = observed(fleet_, [on("a"), on("b"), on("c")], jobs, pools=full)
    stops = [each for each in decide(with_history(state, NOW), NOW) if isinstance(each, StopWorker)]
    assert [each.name for each in stops] == ["A@b"]


def test_reason_why_a_job_waits() -> None:
    fleet_ = [machine(id_) for id_ in "abcd"]
    jobs = [
        job("A", 1, 1, priority=HIGH), job("B", 1, 1), job("C", 1, 1), job("D", 0, 3),
        job("E", 1, 1, priority=LOW), job("F", 1, 1, pools=("moon",)),
    ]  # fmt: skip
    workers = [on("a", "A"), on("b", "B"), on("c", "C"), on("d", "E")]
    full = [PoolStatus("local", capacity=4, reason="4 of 4 machines in use")]
    state = observed(fleet_, workers, jobs, pools=full)
    waiting = make_plan(with_history(state, NOW), NOW).waiting
    assert waiting == {
        "D": Waiting(
            "position 2 of 2: waits for 3 of 3 machines; 1 higher-priority job has machines; 2 "
            "jobs of the same priority have machines; 1 lower-priority job keeps its minimum; "
            "local: 4 of 4 machines in use",
            2, 2, has_machines=False,
        ),
        "F": Waiting(
            "position 1 of 2: waits for 1 of 1 machines; no machine is available", 1, 2,
            has_machines=False,
        ),
    }  # fmt: skip


def test_machines_that_boot_are_named_before_what_the_job_can_do_without() -> None:
    pool = PoolStatus("local", capacity=1, reason="1 of 1 machines in use")
    state = observed([machine("a")], [], [job("A", 1, 2)], nodes="", pools=[pool])
    state = replace(state, payers={"a": "A"})
    waiting = make_plan(with_history(state, NOW), NOW).waiting["A"]
    assert (waiting.position, waiting.length, waiting.has_machines) == (1, 1, True)
    assert waiting.text == (
        "1 machine is booting; position 1 of 1: waits for 1 of 2 machines; "
        "local: 1 of 1 machines in use"
    )


def test_machines_are_named_while_they_are_ordered() -> None:
    pool = PoolStatus("local", capacity=2)
    first = observed([], [], [job("A", 1, 3)], pools=[pool])
    under_way = replace(first, pools=(replace(pool, launching=2),), ordered={"A": 2})
    for state in (first, under_way):
        waiting = make_plan(with_history(state, NOW), NOW).waiting["A"]
        assert waiting.text == (
            "2 machines are ordered; position 1 of 1: waits for 1 of 3 machines; "
            "no other machine is available"
        )


def test_the_queue_is_in_the_order_in_which_jobs_get_machines() -> None:
    jobs = [
        job("A", 0, 4, priority=LOW), job("B", 0, 2), job("C", 1, 2, priority=LOW),
        job("D", 0, 1, weight=2.0), job("E", 0, 2, priority=HIGH),
    ]  # fmt: skip
    full = [PoolStatus("local", capacity=2)]
    state = observed([machine("a"), machine("b")], [on("a", "A"), on("b", "A")], jobs, pools=full)

    waiting = make_plan(with_history(state, NOW), NOW).waiting

    places = {name: each.position for name, each in waiting.items()}
    assert sorted(places, key=places.__getitem__) == ["C", "E", "D", "B", "A"]
    assert {each.length for each in waiting.values()} == {5}
    assert [name for name, each in waiting.items() if each.has_machines] == ["A"]
    assert "1 lower-priority job gives up machines soon" in waiting["D"].text


# -- properties ----------------------------------------------------------------------------------

demands = st.lists(
    st.builds(
        lambda minimum, more, priority, weight, wants: job(
            "", minimum, max(1, minimum + more), priority=priority, weight=weight, wants=wants
        ),
        st.integers(0, 3),
        st.integers(0, 6),
        st.sampled_from([LOW, NORMAL, HIGH]),
        st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.0, 3.0]),
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=6,
).map(lambda found: [replace(one, job="ABCDEF"[at]) for at, one in enumerate(found)])
#: Machines that are lost, and how many rounds later.
losses = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=20)


@given(st.integers(0, 14), demands, losses, st.integers(0, 14))
def test_every_job_gets_what_the_policy_entitles_it_to(
    before: int, jobs: list[JobDemand], lost: list[tuple[int, int]], after: int
) -> None:
    one = fleet(before, *jobs[: len(jobs) // 2])
    one.rounds(10)
    one.set_jobs(*jobs)
    for number, pause in lost:
        if one.state.machines:
            one.lose(one.state.machines[number % len(one.state.machines)].id)
        one.rounds(pause)
    while len(one.state.machines) > after:
        one.lose(one.state.machines[-1].id)
    one.state = replace(one.state, pools=(selling(PoolStatus("local", capacity=after)),))
    one.rounds(QUIET)
    count = one.counts()
    lacking = [each for each in jobs if count[each.job] < each.needed]
    rich = [each for each in jobs if count[each.job] > each.needed]
    short = [each for each in jobs if count[each.job] < each.desired]
    assert not (lacking and rich), "a minimum goes before everything else"
    assert not short or sum(count.values()) == after, "no machine is idle while a job could use it"
    for poor in short:
        for donor in rich:
            assert donor.priority >= poor.priority
            if donor.priority == poor.priority:
                mine = (count[poor.job] + 1) / poor.weight
                assert count[donor.job] / donor.weight <= mine
    _assert_no_machine_goes_to_and_fro(one)
    takings = len(one.takings)
    one.rounds(QUIET)
    assert (one.counts(), len(one.takings)) == (count, takings), "nothing moves for no reason"


def _assert_no_machine_goes_to_and_fro(one: Fleet) -> None:
    """Only a job that lacks its minimum gets a machine back soon."""
    last: dict[str, Taking] = {}
    for taking in one.takings:
        before = last.get(taking.machine)
        if before is not None and not taking.for_minimum:
            returns = (taking.successor, taking.donor) == (before.donor, before.successor)
            limit = LIMITS.return_seconds if returns else LIMITS.hold_seconds
            assert taking.at - before.at >= limit
        last[taking.machine] = taking


@given(st.integers(0, 40), st.integers(2, 6), st.lists(st.integers(0, 400), max_size=12))
def test_equal_jobs_differ_by_at_most_one_machine(
    capacity: int, count: int, lost: list[int]
) -> None:
    one = fleet(capacity, *(job(f"J{at}", 0, 40) for at in range(count)))
    for number in lost:
        one.rounds(1)
        if one.state.machines:
            one.lose(one.state.machines[number % len(one.state.machines)].id)
    one.rounds(QUIET)
    counts = [one.counts()[f"J{at}"] for at in range(count)]
    assert sum(counts) == min(capacity, 40 * count)
    assert max(counts) - min(counts) <= 1


@given(demands, st.integers(1, 14))
def test_no_machine_of_a_minimum_is_taken(jobs: list[JobDemand], capacity: int) -> None:
    one = fleet(capacity, *jobs)
    needed = {each.job: each.needed for each in jobs}
    for _ in range(QUIET):
        before, known = one.counts(), len(one.takings)
        one.round()
        given_up = Counter(each.donor for each in one.takings[known:])
        assert all(before[name] - count >= needed[name] for name, count in given_up.items())


def test_minimum_of_a_low_job_is_served_under_permanent_pressure() -> None:
    """Each round brings a new high job that takes the place of the one that ends."""
    low = job("L", 1, 4, priority=LOW)
    high = [job(f"H{at}", 1, 4, priority=HIGH) for at in range(200)]
    one = fleet(3, *high[:6])
    rounds = 0
    while not one.counts()["L"] and rounds < 150:
        rounds += 1
        one.set_jobs(low, *high[rounds : rounds + 6])
        one.round()
    levels = HIGH - LOW
    assert levels * LIMITS.age_seconds < rounds * ROUND_SECONDS
    assert rounds * ROUND_SECONDS < levels * LIMITS.age_seconds + 10 * ROUND_SECONDS
    one.rounds(QUIET)
    assert one.counts()["L"] == 1


@example([job("A", 0, 2), job("B", 0, 2, priority=HIGH)])
@given(demands)
def test_order_of_equal_submissions_is_the_only_tie_break(jobs: list[JobDemand]) -> None:
    """The order of machines in an observation does not matter."""
    machines = [machine(id_) for id_ in "abc"]
    plans = set()
    for order in permutations(machines):
        state = observed(list(order), jobs=jobs, pools=[PoolStatus("local", capacity=3)])
        plans.add(tuple(map(str, decide(with_history(state, NOW), NOW))))
    assert len(plans) == 1
