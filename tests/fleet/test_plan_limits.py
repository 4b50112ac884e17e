"""Limits of machines for each user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import NOW, carried_out, decide, job, machine, observed, on

from vcasgd.fleet.observed import JobDemand, Observed, PoolStatus, with_history
from vcasgd.fleet.plan.decide import Waiting, make_plan
from vcasgd.fleet.plan.shares import within_limits

ROUND_SECONDS = 30.0


def ann(name: str, minimum: int = 0, maximum: int = 4, **fields: object) -> JobDemand:
    return job(name, minimum, maximum, owner="ann", **fields)


@pytest.mark.parametrize(
    ("limit", "jobs", "expected"),
    [
        (9, [ann("A", 1, 4), ann("B", 1, 4)], {"A": 4, "B": 4}),
        (4, [ann("A", 1, 4), ann("B", 1, 4)], {"A": 2, "B": 2}),
        (4, [ann("A", 1, 9, weight=3.0), ann("B", 1, 9)], {"A": 3, "B": 1}),
        (4, [ann("A", 1, 4), ann("B", 1, 4, priority=1)], {"A": 1, "B": 3}),
        (1, [ann("A", 1, 4), ann("B", 1, 4)], {"A": 1, "B": 0}),
        (3, [ann("A", 3, 4), ann("B", 3, 4)], {"A": 3, "B": 0}),
        (2, [ann("A", 1, 4), job("B", 1, 4, owner="bob"), job("C", 1, 4)],
         {"A": 2, "B": 4, "C": 4}),
        (2, [ann("A", 1, 4, running=False), ann("B", 1, 4)], {"A": 0, "B": 2}),
        (2, [ann("A", 0, 4, wants=1), ann("B", 0, 4)], {"A": 1, "B": 1}),
    ],
)  # fmt: skip
def test_a_limit_is_divided_among_the_jobs_of_its_user(
    limit: int, jobs: list[JobDemand], expected: dict[str, int]
) -> None:
    state = replace(observed(jobs=jobs), owner_limits={"ann": limit})

    limited = within_limits(state, NOW).jobs

    assert {each.job: each.desired for each in limited} == expected
    for before, after in zip(jobs, limited, strict=True):
        why = f"all jobs of ann together may have {limit} machine{'s' if limit > 1 else ''}"
        assert after.limited == (why if after.desired < before.desired else None)


def test_a_job_that_waits_because_of_the_limit_says_so() -> None:
    jobs = [ann("A", 1, 4), ann("B", 1, 4), job("C", 1, 1, owner="bob")]
    fleet = [machine(id_) for id_ in "abc"]
    state = observed(fleet, [on("a", "A"), on("b", "B"), on("c", "C")], jobs)
    state = within_limits(replace(state, owner_limits={"ann": 2}), NOW)

    why = "waits for 3 of 4 machines; all jobs of ann together may have 2 machines"
    assert make_plan(with_history(state, NOW), NOW).waiting == {
        "A": Waiting(why), "B": Waiting(why)
    }  # fmt: skip


def test_a_job_waits_because_of_the_limit_and_a_full_pool() -> None:
    full = [PoolStatus("local", capacity=1, reason="1 of 1 machines in use")]
    state = observed([machine("c")], [on("c", "C")], [ann("A", 1, 4), job("C", 1, 1)], pools=full)
    state = within_limits(replace(state, owner_limits={"ann": 2}), NOW)

    (waiting,) = make_plan(with_history(state, NOW), NOW).waiting.values()
    assert waiting.text == (
        "position 1 of 1: waits for 4 of 4 machines; 1 job of the same priority has machines; "
        "local: 1 of 1 machines in use; all jobs of ann together may have 2 machines"
    )


def rounds(
    state: Observed, jobs: list[JobDemand], count: int, since: float = NOW
) -> Iterator[Observed]:
    """Yield the fleet after each round. The demands are new in each, as the controller's."""
    for number in range(1, count + 1):
        now = since + number * ROUND_SECONDS
        state = with_history(within_limits(replace(state, jobs=tuple(jobs)), now), now)
        state = carried_out(state, decide(state, now), now)
        yield state


demands = st.lists(
    st.builds(
        lambda minimum, more, priority, owner: job(
            "", minimum, max(1, minimum + more), priority=priority, owner=owner
        ),
        st.integers(0, 2),
        st.integers(0, 5),
        st.sampled_from([-1, 0, 1]),
        st.sampled_from(["ann", "bob", None]),
    ),
    min_size=1,
    max_size=6,
).map(lambda found: [replace(one, job="ABCDEF"[at]) for at, one in enumerate(found)])


@given(demands, demands, st.integers(1, 8), st.integers(0, 12))
def test_a_user_never_gets_more_machines_than_the_limit(
    first: list[JobDemand], second: list[JobDemand], limit: int, capacity: int
) -> None:
    state = observed(pools=[PoolStatus("local", capacity=capacity)])
    state = replace(state, owner_limits={"ann": limit})
    for number, jobs in enumerate((first, second)):
        owners = {each.job: each.owner for each in jobs}
        # a job of the second list with the same name is another one, which may have another owner
        state = replace(state, workers=())
        for each in rounds(state, jobs, 30, NOW + number * 30 * ROUND_SECONDS):
            counts = Counter(owners[one.job] for one in each.workers)
            assert counts["ann"] <= limit
        state = each
    could = sum(each.desired for each in second if each.owner == "ann")
    others = sum(each.desired for each in second if each.owner != "ann")
    if capacity >= could + others:
        assert counts["ann"] == min(limit, could), "and gets what the limit allows"


def test_a_lower_limit_takes_machines_back_and_gives_none_meanwhile() -> None:
    jobs = [ann("A", 1, 4), ann("B", 1, 4, priority=1)]
    fleet = [machine(id_) for id_ in "abcd"]
    state = observed(fleet, [on(id_, "A") for id_ in "abcd"], jobs)
    most = 4
    for each in rounds(replace(state, owner_limits={"ann": 2}), jobs, 20):
        assert len(each.workers) <= most
        most = max(2, len(each.workers))
    assert Counter(one.job for one in each.workers) == {"A": 1, "B": 1}


def test_a_limited_job_takes_no_machine_of_another_user() -> None:
    jobs = [ann("A", 1, 4, priority=1), job("B", 0, 4, owner="bob")]
    fleet = [machine(id_) for id_ in "abcd"]
    state = observed(
        fleet,
        [on("a", "A"), *(on(id_, "B") for id_ in "bcd")],
        jobs,
        pools=[PoolStatus("local", capacity=4)],
    )
    *_, state = rounds(replace(state, owner_limits={"ann": 1}), jobs, 20)
    assert Counter(one.job for one in state.workers) == {"A": 1, "B": 3}
